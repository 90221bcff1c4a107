"""The supervisor: starts the whole in order, starts again what ends by itself, stops all of it, leaves no process.

Holds no thread and imports little, as it stays for as long as the whole is up.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from torpor.embedded import log_files, runfile
from torpor.embedded.child import spawn
from torpor.embedded.console import Console
from torpor.embedded.layout import DataDir
from torpor.embedded.process_table import TICKS_PER_S
from torpor.embedded.restarting import RestartRule
from torpor.embedded.runfile import Run, RunningProcess
from torpor.embedded.store_watch import StoreWatch
from torpor.embedded.supervised import ProcessSpec, Supervised
from torpor.errors import CannotStart

START_DEADLINE_S: Final = 60.0
START_ENDS_MAX: Final = 4
"""How often a process may end before the whole was ready; then the start has failed."""
STOP_PATIENCE_S: Final = 8.0
"""How long a process may take to stop by itself before it is killed."""
LEAVE_S: Final = 60.0
"""How long sessions may take to fall asleep before the whole stops without them."""
TRIM_EVERY_S: Final = 30.0
RESTARTS_BYTES_MAX: Final = 256 * 1024
Arrange = Callable[[Run, dict[str, Any]], tuple[ProcessSpec, list[ProcessSpec]]]
Leave = Callable[[Run, float], ProcessSpec | None]
_STOP_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Supervisor:
    """Runs one whole: a server first, then the services that need it, until it is told to stop.

    `preparation` is a short-lived process that does what needs heavy libraries; it reports steps on its standard
    output: `working` (with a text, or none to say that it goes on), `configured` (the server may start), `streams`
    (the services may start), `ready`, or an error.
    `arrange` makes the processes to run out of what `configured` says, the server first. `leave` makes the one that
    puts the sessions to sleep when the whole is told to stop.
    """

    def __init__(
        self,
        data: DataDir,
        run: Run,
        console: Console,
        *,
        preparation: ProcessSpec,
        arrange: Arrange,
        leave: Leave = lambda _, __: None,
        rule: RestartRule | None = None,
    ) -> None:
        self._data = data
        self._run = run
        self._console = console
        self._preparation = preparation
        self._arrange = arrange
        self._leave = leave
        self._rule = rule or RestartRule()
        self._server: list[Supervised] = []
        self._store: StoreWatch | None = None
        self._services: list[Supervised] = []
        self._wanted: list[Supervised] = []
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._stop_asked = 0
        self._ready = False
        self._ready_by_s = time.monotonic() + START_DEADLINE_S
        self._trim_due_s = time.monotonic() + TRIM_EVERY_S

    def run(self) -> int:
        """Start, watch and stop; 0 after an orderly stop, else `CannotStart`, or 1 when a process was given up."""
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        for number in (*_STOP_SIGNALS, signal.SIGCHLD):
            # Under nohup it is to go on without its terminal.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._noted)
        preparing: subprocess.Popen[bytes] | None = None
        try:
            preparing = spawn(
                self._preparation.argv,
                env=self._preparation.env,
                cwd=self._preparation.cwd,
                log=self._preparation.log,
                pipe=True,
            )
            return self._watch(preparing)
        finally:
            if preparing is not None and preparing.poll() is None:
                preparing.kill()
                preparing.wait()
            if self._stop_asked and self._ready:
                self._take_leave()
            self._stop_all()
            runfile.remove(self._data)
            if self._stop_asked:
                self._console.say("stopped", "torpor up: stopped; the sessions stay", data_dir=str(self._data.root))

    def _noted(self, number: int, _frame: object) -> None:
        if number in _STOP_SIGNALS:
            self._stop_asked += 1

    # --- watching ---------------------------------------------------------------------------------------------

    def _watch(self, preparing: subprocess.Popen[bytes]) -> int:
        assert preparing.stdout is not None
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        steps = preparing.stdout.fileno()
        os.set_blocking(steps, False)
        poll.register(steps, select.POLLIN)
        pending = b""
        self._ready_by_s = time.monotonic() + START_DEADLINE_S
        while not self._stop_asked:
            for handle, _ in poll.poll(self._pause_ms()):
                if handle == self._wake:
                    os.read(self._wake, 4096)
                    continue
                chunk = os.read(steps, 65536)
                if not chunk:
                    poll.unregister(steps)
                    if not self._ready:
                        raise self._preparation_died()
                pending += chunk
            *lines, pending = pending.split(b"\n")
            for line in lines:
                self._step(json.loads(line))
            preparing.poll()
            if self._look_after():
                return 1
            if not self._ready and time.monotonic() > self._ready_by_s:
                raise self._not_ready()
        return 0

    def _pause_ms(self) -> float:
        due = [self._trim_due_s]
        if self._store is not None:
            due.append(self._store.due_s)
        if not self._ready:
            due.append(self._ready_by_s)
        due += [s.state.due_at_s for s in self._wanted if s.running is None and s.state.due_at_s is not None]
        return max(0.0, (min(due) - time.monotonic()) * 1000 + 1)

    def _look_after(self) -> bool:
        """Reap, start what is due, keep logs within bounds; True when a process was given up."""
        ended = [supervised for supervised in self._wanted if self._reaped(supervised)]
        if any(supervised.state.due_at_s is None for supervised in ended):
            return True
        again = [supervised for supervised in self._wanted if self._is_due(supervised)]
        for supervised in again:
            supervised.restarts += 1
            self._start(supervised)
        if ended or again:
            self._publish()
        for supervised in again:
            name = supervised.spec.name
            self._console.say("started", f"torpor up: {name} is started again", process=name)
        self._trim_logs()
        self._keep_right()
        return False

    def _keep_right(self) -> None:
        """Put back a lost run file; end a server whose streams stopped storing, to be started as after any end."""
        if self._store is None or time.monotonic() < self._store.due_s:
            return
        if not self._data.run_file.exists():
            self._publish()
        if not self._store.wants_restart():
            return
        for server in self._server:
            name = server.spec.name
            text = f"torpor up: the streams of {name} stopped storing, and there is room: starting it again"
            self._console.say("stuck", text, process=name)
            # Killed, as what it holds cannot be written any more; all that counts is in the log.
            server.signal(signal.SIGKILL)

    def _reaped(self, supervised: Supervised) -> bool:
        code = supervised.ended()
        if code is None:
            return False
        self._has_ended(supervised, code)
        if not self._ready and supervised.state.failures >= START_ENDS_MAX:
            raise self._does_not_start(supervised)
        return True

    @staticmethod
    def _is_due(supervised: Supervised) -> bool:
        due_at_s = supervised.state.due_at_s
        return supervised.running is None and due_at_s is not None and due_at_s <= time.monotonic()

    def _trim_logs(self) -> None:
        if time.monotonic() < self._trim_due_s:
            return
        self._trim_due_s = time.monotonic() + TRIM_EVERY_S
        for supervised in self._wanted:
            log_files.trim(supervised.spec.log)
        log_files.trim(self._data.restarts, RESTARTS_BYTES_MAX)

    def _start(self, supervised: Supervised) -> None:
        try:
            supervised.start()
        except OSError as error:
            supervised.state = supervised.state.after_end(supervised.rule, 0.0, time.monotonic())
            self._console.say(
                "not-started", f"torpor up: {supervised.spec.name} cannot be started: {error}", error=str(error)
            )

    def _has_ended(self, supervised: Supervised, code: int) -> None:
        spec, ran_s, now_s = supervised.spec, supervised.ran_s, time.monotonic()
        supervised.state = supervised.state.after_end(supervised.rule, ran_s, now_s)
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        due_at_s = supervised.state.due_at_s
        if due_at_s is None:
            next_step = f"given up after {supervised.state.failures} ends in a row: stopping the whole; see {spec.log}"
        else:
            next_step = f"starting it again in {due_at_s - now_s:.1f} s (log: {spec.log})"
        last = log_files.last_lines(spec.log, 1)
        said = f"\n  last words: {last[0][:300]}" if last and code >= 0 else ""
        record = {
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "process": spec.name,
            "exit_code": code,
            "ran_s": round(ran_s, 1),
            "ends_in_a_row": supervised.state.failures,
            "again_in_s": None if due_at_s is None else round(due_at_s - now_s, 2),
        }
        self._console.say("ended", f"torpor up: {spec.name} ended ({how}); {next_step}{said}", **record)
        # The record is for people who ask later; a full disk must not stop the restart.
        with suppress(OSError), self._data.restarts.open("a", encoding="utf-8") as restarts:
            restarts.write(json.dumps(record) + "\n")

    # --- starting ---------------------------------------------------------------------------------------------

    def _step(self, step: dict[str, Any]) -> None:
        match step.get("step"):
            case "working":
                # What takes minutes is done before anything is started, and says that it goes on.
                self._ready_by_s = time.monotonic() + START_DEADLINE_S
                text = step.get("text")
                if text:
                    self._console.say("working", f"torpor up: {text}", doing=text)
            case "configured":
                server, services = self._arrange(self._run, step)
                self._server = [Supervised(server, self._rule)]
                self._store = StoreWatch(server.log, self._data.root)
                self._services = [Supervised(spec, self._rule) for spec in services]
                self._want(self._server)
            case "streams":
                self._want(self._services)
            case "ready":
                self._ready = self._run.ready = True
                self._publish()
                self._announce(step)
            case _:
                raise CannotStart(
                    str(step.get("code", "cannot-start")), str(step.get("message")), str(step.get("advice"))
                )

    def _want(self, processes: Sequence[Supervised]) -> None:
        for supervised in processes:
            self._wanted.append(supervised)
            self._start(supervised)
        self._publish()

    def _publish(self) -> None:
        self._run.processes = [p for p in (s.running for s in self._wanted) if p is not None]
        try:
            runfile.write(self._data, self._run)
        except OSError as error:
            if not self._ready:
                raise CannotStart(
                    "cannot-write",
                    f"cannot write {self._data.run_file}: {error.strerror}",
                    "free space or make the directory writable, or choose another with --data-dir",
                ) from error
            self._console.say("run-file", f"torpor up: cannot write {self._data.run_file}: {error.strerror}")

    def _announce(self, step: dict[str, Any]) -> None:
        where = [f"{p.name} ({p.pid})" for p in self._run.processes]
        ready_s = step.get("ready_s", 0.0)
        text = "\n".join(
            [
                f"torpor up: ready in {ready_s:.1f} s",
                f"  data       {self._data.root}",
                f"  nats       {self._run.nats_url}",
                f"  driver     {self._run.driver}",
                f"  processes  {', '.join(where)}",
                f"  logs       {self._data.logs}",
                "Try, in another terminal:",
                f"  torpor session create{self._data_dir_option()}",
                f"  torpor status{self._data_dir_option()}",
                "Ctrl-C stops everything; the sessions stay.",
            ]
        )
        self._console.say(
            "ready",
            text,
            ready_s=round(ready_s, 3),
            data_dir=str(self._data.root),
            nats_url=self._run.nats_url,
            driver=self._run.driver,
            supervisor={"pid": self._run.supervisor.pid},
            processes=[{"name": p.name, "pid": p.pid} for p in self._run.processes],
        )

    def _data_dir_option(self) -> str:
        chosen = DataDir.choose(None).root != self._data.root
        return f" --data-dir {self._data.root}" if chosen else ""

    def _preparation_died(self) -> CannotStart:
        last = " / ".join(log_files.last_lines(self._preparation.log, 2)) or "it said nothing"
        return CannotStart("cannot-start", f"preparing the whole failed: {last}", f"see {self._preparation.log}")

    def _does_not_start(self, supervised: Supervised) -> CannotStart:
        last = log_files.last_lines(supervised.spec.log, 1)
        said = f"; its last words: {last[0][:300]}" if last else ""
        return CannotStart(
            "service-ended", f"{supervised.spec.name} does not start{said}", f"see {supervised.spec.log}"
        )

    def _not_ready(self) -> CannotStart:
        down = [s.spec.name for s in self._wanted if s.running is None]
        what = f"; not running: {', '.join(down)}" if down else ""
        return CannotStart(
            "not-ready", f"the whole was not ready within {START_DEADLINE_S:.0f} s{what}", f"see {self._data.logs}"
        )

    # --- stopping ---------------------------------------------------------------------------------------------

    def _take_leave(self) -> None:
        """Let the sessions fall asleep while there is a whole for it; a second Ctrl-C means: now."""
        spec = self._leave(self._run, LEAVE_S)
        if spec is None or self._stop_asked > 1:
            return
        self._console.say("leaving", "torpor up: putting the sessions to sleep (Ctrl-C again: stop at once)")
        leaving = spawn(spec.argv, env=spec.env, cwd=spec.cwd, log=spec.log, pipe=True)
        assert leaving.stdout is not None
        output = leaving.stdout.fileno()
        deadline_s, said = time.monotonic() + LEAVE_S + STOP_PATIENCE_S, b""
        while self._stop_asked == 1 and (left_s := deadline_s - time.monotonic()) > 0:
            ready, _, _ = select.select([self._wake, output], [], [], left_s)
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._look_after()
            if output in ready:
                chunk = os.read(output, 65536)
                if not chunk:
                    break
                said += chunk
        leaving.kill()
        leaving.wait()
        self._tell_who_sleeps(said, spec)

    def _tell_who_sleeps(self, said: bytes, spec: ProcessSpec) -> None:
        try:
            told = json.loads(said)
        except ValueError:
            text = f"torpor up: not every session may sleep; the next start adopts what runs on (log: {spec.log})"
            self._console.say("not-asleep", text)
            return
        if told["left"]:
            text = f"torpor up: these do not sleep, and are adopted by the next start: {', '.join(told['left'])}"
            self._console.say("not-asleep", text, sessions=told["left"])
        if told["asleep"]:
            count = told["asleep"]
            self._console.say("asleep", f"torpor up: {count} session{'s' * (count > 1)} put to sleep", asleep=count)

    def _stop_all(self) -> None:
        asked = self._stop_asked
        self._stop(self._services, asked)
        # Last, as the services use it to the end.
        self._stop(self._server, asked)

    def _stop(self, processes: Sequence[Supervised], asked: int) -> None:
        for number, patience_s in ((signal.SIGTERM, STOP_PATIENCE_S), (signal.SIGKILL, STOP_PATIENCE_S)):
            for supervised in processes:
                supervised.signal(number)
            deadline_s = time.monotonic() + patience_s
            while self._any_left(processes):
                left_s = deadline_s - time.monotonic()
                # A second Ctrl-C means: now.
                if left_s <= 0 or (number == signal.SIGTERM and self._stop_asked > max(asked, 1)):
                    break
                ready, _, _ = select.select([self._wake], [], [], left_s)
                if ready:
                    os.read(self._wake, 4096)

    @staticmethod
    def _any_left(processes: Sequence[Supervised]) -> bool:
        for supervised in processes:
            supervised.ended()
        return any(supervised.running is not None for supervised in processes)


def supervisor_identity() -> RunningProcess:
    """This process, as the run file names it."""
    from torpor.embedded.process_table import started_ticks  # noqa: PLC0415

    pid = os.getpid()
    return RunningProcess("supervisor", pid, started_ticks(pid) or TICKS_PER_S)
