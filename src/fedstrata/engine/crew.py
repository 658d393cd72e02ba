"""What all engines with several workers share: who gets which job, answers in their turn, and workers that die."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeAlias, final

from fedstrata.core.merges import BaseLog
from fedstrata.core.wire import Bytes
from fedstrata.engine.base import MachineBase
from fedstrata.engine.schedule import largest_first, num_ahead
from fedstrata.engine.spool import DEFAULT_MEMORY_BYTES, Spool
from fedstrata.engine.work import Done, Job, read_state, settle
from fedstrata.errors import EngineError, FedstrataError, RunFolderError
from fedstrata.record.clients import ClientStates
from fedstrata.record.failure import ClientFailure
from fedstrata.server.orders import Answer, Order

MAX_TRIES = 3
"""A client whose work ends its worker this often has failed."""


@dataclass(frozen=True)
class Ready:
    """A worker has its model and waits for jobs."""


@dataclass(frozen=True)
class Gone:
    """A worker has ended without being told to, for this reason."""

    reason: str


Happened: TypeAlias = Ready | Gone | Done | ClientFailure


class Crew(ABC):
    """Workers. Each does its jobs one after the other, in the order in which it got them."""

    @property
    @abstractmethod
    def size(self) -> int:
        """How many workers there should be."""

    @abstractmethod
    def hire(self) -> int:
        """Starts a worker and returns its number, which no other one ever has; `Ready` follows."""

    @abstractmethod
    def give(self, worker: int, job: Job, state: Bytes) -> None:
        """Hands over a job and its client's state; what is given to a worker that has ended is lost."""

    @abstractmethod
    def happened(self, *, wait: bool) -> tuple[int, Happened] | None:
        """The next thing that a worker has to say; None if it has nothing, and nobody is to wait."""

    @abstractmethod
    def publish(self, log: BaseLog) -> None:
        """Lets workers know where the base model stands for the jobs that follow."""

    @abstractmethod
    def dismiss(self, worker: int) -> None:
        """Ends a worker at once; it has nothing more to say."""

    @abstractmethod
    def close(self) -> None:
        """Ends all workers and removes what they shared."""


@final
class CrewEngine:
    """Runs clients on a crew. Results are those of `LocalEngine`, bit for bit, whatever the crew's size.

    The server's thread packs tasks and reads answers; client states and the base model's updates stay with it.

    Args:
        crew: The workers; they start with the first round, or with `start`.
        states: Where client state lives.
        base: What this machine received of the base model's updates.
        folder: Where answers wait that do not fit into memory; None: a temporary folder.
        memory_bytes: How much of them waits in memory.
    """

    def __init__(
        self,
        crew: Crew,
        states: ClientStates,
        base: MachineBase,
        *,
        folder: Path | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
    ) -> None:
        self._crew, self.states, self.base = crew, states, base
        self._folder, self._memory_bytes = folder, memory_bytes
        self._held: dict[int, deque[Job]] = {}
        self._ready: set[int] = set()
        self._failed_starts = 0

    def __enter__(self) -> CrewEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the workers."""
        self._crew.close()
        self._held.clear()
        self._ready.clear()

    def start(self) -> None:
        """Starts the workers and waits for the first one.

        Raises:
            EngineError: If they cannot start.
        """
        self._fill()
        while not self._ready:
            self._hear(None, wait=True)

    def run(self, orders: Sequence[Order]) -> Iterator[tuple[str, Answer]]:
        """Answers in ascending client id; see `Engine`.

        Raises:
            EngineError: If workers cannot start.
        """
        with Spool(self._folder, self._memory_bytes) as spool:
            shift = _Shift({o.client: o for o in orders}, largest_first(orders), spool)
            try:
                for client in sorted(shift.orders):
                    while client not in spool:
                        self._hand_out(shift)
                        if client not in spool:
                            self._hear(shift, wait=True)
                    self._hand_out(shift)
                    while self._hear(shift, wait=False):
                        self._hand_out(shift)
                    yield client, spool.take(client)
            finally:  # whoever still works does so for nobody
                for worker in [w for w, jobs in self._held.items() if jobs]:
                    self._drop(worker)
                    self._crew.dismiss(worker)

    def _fill(self) -> None:
        while len(self._held) < self._crew.size:
            self._held[self._crew.hire()] = deque()

    def _drop(self, worker: int) -> deque[Job]:
        self._ready.discard(worker)
        return self._held.pop(worker)

    def _hand_out(self, shift: _Shift) -> None:
        """Gives jobs to workers that need one."""
        self._fill()
        for ahead in (0, 1):  # idle workers first
            for worker in sorted(self._ready):
                more = ahead and num_ahead(shift.num_waiting, self._crew.size)
                while len(self._held[worker]) < 1 + more and shift.num_waiting:
                    self._begin(shift, worker)

    def _begin(self, shift: _Shift, worker: int) -> None:
        job = shift.next_job()
        state: Bytes | ClientFailure
        try:
            self.base.receive(job, self._crew.publish)
            state = read_state(self.states, job)
        except RunFolderError:
            raise
        except FedstrataError as error:
            state = job.failed(error)
        if isinstance(state, ClientFailure):
            shift.put(job, state)
            return
        self._held[worker].append(job)
        self._crew.give(worker, job, state)

    def _hear(self, shift: _Shift | None, *, wait: bool) -> bool:
        """Deals with one thing that happened; whether there was one."""
        found = self._crew.happened(wait=wait)
        if found is None:
            return False
        worker, what = found
        if worker not in self._held:
            return True
        if isinstance(what, Ready):
            self._ready.add(worker)
            self._failed_starts = 0
        elif isinstance(what, Gone):
            self._replace(shift, worker, what.reason)
        elif shift is not None:
            job = self._held[worker].popleft()
            shift.put(job, settle(self.states, job, what))
        return True

    def _replace(self, shift: _Shift | None, worker: int, reason: str) -> None:
        """Another worker takes a dead one's place; the client it died with is tried again."""
        if worker not in self._ready:
            self._failed_starts += 1
            if self._failed_starts >= MAX_TRIES:
                raise EngineError("Workers cannot start", got=reason, do="run with --engine local")
        jobs = self._drop(worker)
        self._crew.dismiss(worker)
        if shift is not None and jobs:
            shift.blame(jobs[0], reason)
            for job in reversed(jobs):
                shift.again(job)
        self._fill()


class _Shift:
    """One call of `run`: what waits, and what was tried."""

    def __init__(self, orders: dict[str, Order], waiting: deque[Order], spool: Spool) -> None:
        self.orders, self._waiting, self._spool = orders, waiting, spool
        self._again: deque[Job] = deque()
        self._deaths: Counter[str] = Counter()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting) + len(self._again)

    def next_job(self) -> Job:
        """The next one, packed; what was begun before comes first."""
        if self._again:
            return self._again.popleft()
        order = self._waiting.popleft()
        return Job.of(order.client, order.accepted_round, order.pack())

    def put(self, job: Job, answer: Answer) -> None:
        self._spool.put(job.client, answer)
        self.orders[job.client].arrived()

    def blame(self, job: Job, reason: str) -> None:
        """Notes that a worker died with this job."""
        self._deaths[job.client] += 1
        if self._deaths[job.client] >= MAX_TRIES:
            detail = f"its worker ended each of the {MAX_TRIES} times that it was tried: {reason}"
            self.put(job, ClientFailure(job.client, job.server_round, "died", detail))

    def again(self, job: Job) -> None:
        """Puts a job back, unless it has failed for good."""
        if job.client not in self._spool:
            self._again.appendleft(job)
