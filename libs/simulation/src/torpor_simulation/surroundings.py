"""What one simulated process stands in: its machine, the network around it, and the faults that may strike it."""

from dataclasses import dataclass

from torpor_contracts.errors import Transient
from torpor_simulation.faults import Faults
from torpor_simulation.network import Network
from torpor_simulation.process import Process
from torpor_simulation.trace import Trace


@dataclass(frozen=True)
class Surroundings:
    """Shared by all ports of one process; each asks it before it touches the world."""

    process: Process
    machine: str
    network: Network
    faults: Faults
    trace: Trace

    def reach_log(self) -> None:
        """Raise unless the process lives and its machine and the log's database can talk."""
        self.process.check()
        if not self.network.reaches_log(self.machine):
            raise Transient("the log's database is not reachable", retry_after_s=0.5)

    def reach_bus(self) -> None:
        """Raise unless the process lives and its machine and the bus can talk."""
        self.process.check()
        if not self.network.reaches_bus(self.machine):
            raise Transient("the bus is not reachable", retry_after_s=0.5)

    def note(self, kind: str, *details: object) -> None:
        """Add a line to the world's trace."""
        self.trace.add(kind, self.process.name, *details)
