"""Programs of a simulated world: kept running by a supervisor, which starts each again after every death."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from torpor_contracts.errors import Transient
from torpor_simulation.process import Process, ProcessKilled
from torpor_simulation.trace import Trace

Main = Callable[[Process], Awaitable[None]]


@dataclass(frozen=True)
class Program:
    """Something that runs on a machine. `main` is given a fresh process each time and never returns by itself."""

    name: str
    machine: str
    main: Main


class Supervisor:
    """Keeps one program running. A death that no fault has caused is a finding and is told to `broken`."""

    def __init__(self, program: Program, trace: Trace, broken: Callable[[str], None], restart_s: float) -> None:
        self.program = program
        self._trace = trace
        self._broken = broken
        self._restart_s = restart_s
        self._runs = 0
        self.process: Process | None = None
        self._may_run = asyncio.Event()
        self._may_run.set()

    async def run(self) -> None:
        """Start the program again and again, until cancelled."""
        try:
            while True:
                await self._may_run.wait()
                self._runs += 1
                self.process = Process(f"{self.program.name}#{self._runs}")
                self._trace.add("start", self.process.name)
                self.process.spawn(self._live(self.process), "main")
                await self.process.ended()
                await asyncio.sleep(self._restart_s)
        finally:
            if self.process is not None:
                self.process.kill()

    def crash(self) -> None:
        """Kill the present process."""
        if self.process is not None and self.process.alive:
            self._trace.add("crash", self.process.name)
            self.process.kill()

    def hold(self) -> None:
        """Kill the program, and do not start it again before `release`: its machine is off."""
        self._may_run.clear()
        self.crash()

    def release(self) -> None:
        """Let the program run again."""
        self._may_run.set()

    async def _live(self, process: Process) -> None:
        try:
            await self.program.main(process)
        except ProcessKilled:
            raise
        except Exception as error:  # noqa: BLE001  (whatever a program dies of, the world goes on and says so)
            # To give up on what is away too long is a program's right: its supervisor starts it again.
            self._trace.add("died", process.name, _reasons(error))
            if process.alive and not _is_transient(error):
                self._broken(f"{process.name} died of {_reasons(error)}")
        else:
            if process.alive:
                self._broken(f"{process.name} ended by itself")
        finally:
            process.kill()


def _reasons(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_reasons(inner) for inner in error.exceptions)
    return f"{type(error).__name__}: {error}"


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_transient(inner) for inner in error.exceptions)
    return isinstance(error, Transient)
