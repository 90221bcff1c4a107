"""An agent at work in its machine: it has read a project and keeps what it knows in its own memory.

It is told what to do through a named pipe, one line at a time, and answers through another. What it knows is nowhere
but in this process: its notes, the project's sources, and a token that it has never written down.
"""

import json
import os
import secrets
import socket
import sys
import unittest
from pathlib import Path

WORK = Path(__file__).resolve().parent
PROJECT = WORK / "project"
ASKED = "/run/agent.asked"
ANSWERED = "/run/agent.answered"


class Agent:
    """What the agent knows and can do."""

    def __init__(self):
        self.token = secrets.token_hex(8)
        self.notes = []
        self.sources = {}
        self.fixes = {}
        self.log = (WORK / "agent.log").open("a", buffering=1)

    def note(self, text):
        """Remember something, and say so in the log, which stays open."""
        self.notes.append(text)
        self.log.write(f"{text}\n")

    def look(self):
        """Read the project and the ideas for it, and run its tests once."""
        self.sources = {str(path.relative_to(PROJECT)): path.read_text() for path in sorted(PROJECT.rglob("*.py"))}
        self.fixes = {path.stem: path.read_text() for path in sorted((WORK / "fixes").glob("*.py"))}
        lines = sum(text.count("\n") for text in self.sources.values())
        self.note(f"read {len(self.sources)} files, {lines} lines; {len(self.fixes)} ideas")
        found = self.tests()
        self.note(f"{found['failed']} of {found['ran']} tests fail: {', '.join(found['names'])}")
        return found | {"files": len(self.sources), "lines": lines, "fixes": sorted(self.fixes)}

    def attempt(self, name):
        """Put one idea in the place of the broken module, from memory, and run the tests."""
        (PROJECT / "shares" / "split.py").write_text(self.fixes[name])
        found = self.tests()
        self.note(f"{name}: {found['ran'] - found['failed']} of {found['ran']} tests pass")
        return found

    def tests(self):
        """Run the project's tests in a process of their own, with the sources as they are now."""
        answer, told = os.pipe()
        if not os.fork():
            os.dup2(told, 1)
            os.chdir(PROJECT)
            sys.path.insert(0, str(PROJECT))
            sys.dont_write_bytecode = True
            result = unittest.TestResult()
            unittest.defaultTestLoader.discover("tests", top_level_dir=".").run(result)
            failed = sorted(test._testMethodName for test, _ in (*result.failures, *result.errors))
            os.write(told, json.dumps({"ran": result.testsRun, "failed": len(failed), "names": failed}).encode())
            os._exit(0)
        os.close(told)
        with os.fdopen(answer) as said:
            found = json.loads(said.read() or '{"ran": 0, "failed": 0, "names": []}')
        os.wait()
        return found

    def status(self):
        """What it knows, and where it finds itself."""
        return {
            "token": self.token,
            "notes": list(self.notes),
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "log_bytes": self.log.tell(),
        }

    def answer(self, request):
        """Do what one request asks for."""
        what, _, rest = request.strip().partition(" ")
        if what == "look":
            return self.look()
        if what == "try":
            return self.attempt(rest)
        return self.status()


def main():
    """Become a process of its own, then serve until the machine ends."""
    os.mkfifo(ASKED)
    os.mkfifo(ANSWERED)
    if os.fork():
        return  # whoever has started us may go on: the pipes are there
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(nothing, descriptor)
    agent = Agent()
    while True:
        with open(ASKED) as asked:
            request = asked.readline()
        with open(ANSWERED, "w") as answered:
            answered.write(json.dumps(agent.answer(request)) + "\n")


if __name__ == "__main__":
    main()
