"""What no result of Triton's interpreter shows: programs that step out of their memory, or on one another's.

The interpreter runs one program after the other, each as a single thread. On a GPU they run side by side in any order,
their threads keep no step, and a kernel that `pdl_wait` lets begin early finds the one before it at work. After
`check_memory` a launch raises `MemoryFaultError` unless

- every access lies between the first and the last number of a tensor that the kernel was given,
- what one program writes no other reads or writes, or else each has an atomic on the same number between, or both write
  the same there (rows that pad a batch do, to a page which is nobody's),
- between what a program writes and what it reads of that there is a barrier or an atomic, either way round; but it may
  write what it has read if the numbers lie as they lay, for the same threads answer for them,
- every program that may begin early waits: until then it writes nothing, lets no other begin, and reads nothing that
  the kernel before writes.

Order between programs is that of vector clocks, as FastTrack keeps them
(https://users.soe.ucsc.edu/~cormac/papers/pldi09.pdf). Memory is told by the first byte of what is there: a kernel that
reads numbers of another size than it has written is not seen through.
"""

from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

Addresses = npt.NDArray[np.uint64]


class MemoryFaultError(Exception):
    """A kernel does to memory what is undefined on a GPU."""


class Stretch(NamedTuple):
    """What one program does between two of its atomics."""

    program: int
    number: int
    before: dict[int, int]
    """The last stretch of each other program that surely lies before this one."""

    def follows(self, other: "Stretch") -> bool:
        """Whether `other` lies before this one, or in the same program."""
        return self.program == other.program or self.before.get(other.program, -1) >= other.number


class Access(NamedTuple):
    """What one instruction reads or writes, and in which stretch."""

    at: Addresses
    stretch: int
    bits: Addresses = np.zeros(0, np.uint64)
    """Of a store: what it leaves at each address."""


@dataclass
class Launch:
    """What the programs of one launch have done so far."""

    kernel: str
    tensors: list[torch.Tensor]
    """Which it was given: as long as they are held nothing else can be where they are."""
    before: "Launch | None" = None
    """The kernel before, if this one's programs may begin while it runs."""
    stretches: list[Stretch] = field(default_factory=list)
    met: dict[int, dict[int, int]] = field(default_factory=dict)
    """By address of an atomic: the last stretch of each program that lies before the next one there."""
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    atomics: list[Access] = field(default_factory=list)
    stored: list[Addresses] = field(default_factory=list)
    """By this program since its last barrier; as `loaded`."""
    loaded: list[tuple[Addresses, Addresses]] = field(default_factory=list)
    """Of each load all that its pointers say, and what of that it reads."""
    waiting: bool = False
    """Whether this program has yet to wait for the kernel before."""

    def __post_init__(self) -> None:
        spans = sorted(_span(tensor) for tensor in self.tensors if tensor.numel())
        self._starts = np.array([first for first, _ in spans], np.uint64)
        self._ends = np.maximum.accumulate(np.array([end for _, end in spans], np.uint64))

    def begin(self) -> None:
        """The next program begins."""
        self.end()
        self.stretches.append(Stretch(self.stretches[-1].program + 1 if self.stretches else 0, 0, {}))
        self.settle()
        self.waiting = self.before is not None

    def end(self) -> None:
        """A program has returned."""
        self._allow(not self.waiting, "a program that may begin early does not wait for the kernel before")

    def read(self, pointers: Addresses, at: Addresses, size: int) -> None:
        """A load of `size` bytes each `at` those of the pointers that its mask lets through."""
        self._contain(at, size)
        settled = not any(_overlap(at, stored) for stored in self.stored)
        self._allow(settled, "a program reads what another of its threads may have to write yet")
        self.loaded.append((pointers, at))
        if self.waiting and self.before is not None:
            unwritten = not any(_overlap(at, access.at) for access in self.before.writes)
            self._allow(unwritten, f"a program reads what {self.before.kernel} writes, without waiting for it")
        self.reads.append(Access(at, len(self.stretches) - 1))

    def write(self, pointers: Addresses, at: Addresses, size: int, bits: Addresses) -> None:
        """A store of `bits`."""
        self._contain(at, size)
        self._allow(not self.waiting, "a program writes before the kernel before has ended")
        others = [loaded for lying, loaded in self.loaded if not np.array_equal(lying, pointers)]
        settled = not any(_overlap(at, loaded) for loaded in others)
        self._allow(settled, "a program writes what another of its threads may have to read yet")
        self.stored.append(at)
        self.writes.append(Access(at, len(self.stretches) - 1, bits))

    def meet(self, _: Addresses, at: Addresses, size: int) -> None:
        """An atomic: what lies before it here lies before what comes after the next one there."""
        self._contain(at, size)
        self._allow(not self.waiting, "a program counts before the kernel before has ended")
        self.atomics.append(Access(at, len(self.stretches) - 1))
        program, number, before = self.stretches[-1]
        before = dict(before)
        for address in at.tolist():
            known = self.met.setdefault(address, {})
            before |= known
            known |= before | {program: number}
        self.settle()
        self.stretches.append(Stretch(program, number + 1, before))

    def wait(self) -> None:
        """This program waits for the kernel before."""
        self.waiting = False

    def release(self) -> None:
        """The next kernel may begin as far as this program is concerned."""
        self._allow(not self.waiting, "a program lets the next kernel begin before it has waited itself")

    def settle(self) -> None:
        """All threads of this program have come as far."""
        self.stored, self.loaded = [], []

    def finish(self) -> None:
        """All programs have returned: whether they could have run in any order. Only what they wrote is kept."""
        self.end()
        if self.writes:
            self._compare()
        self.before, self.reads, self.atomics = None, [], []
        self.settle()

    def _compare(self) -> None:
        at = np.concatenate([access.at for access in self.writes])
        bits = np.concatenate([access.bits for access in self.writes])
        stretch = np.concatenate([np.full(len(access.at), access.stretch) for access in self.writes])
        order = np.lexsort([stretch, at])
        at, bits, stretch = at[order], bits[order], stretch[order]
        again = np.flatnonzero((at[1:] == at[:-1]) & (bits[1:] != bits[:-1]))
        for one, other in np.unique(np.stack([stretch[again], stretch[again + 1]], 1), axis=0).tolist():
            self._allow(self._ordered(one, other), f"memory is written by {self._programs(one, other)}")
        for access in self.reads + self.atomics:
            found = _found(access.at, at)
            for one in np.unique(stretch[found]).tolist():
                if not self._ordered(one, access.stretch):
                    theirs = found[stretch[found] == one]
                    mine = self._written_by(self.stretches[access.stretch].program)
                    same = all(mine.get(where) == left for where, left in zip(at[theirs], bits[theirs], strict=True))
                    self._allow(same, f"memory is read and written by {self._programs(one, access.stretch)}")

    def _written_by(self, program: int) -> dict[int, int]:
        """By address, what a program leaves there."""
        writes = [access for access in self.writes if self.stretches[access.stretch].program == program]
        return {where: left for access in writes for where, left in zip(access.at, access.bits, strict=True)}

    def _ordered(self, one: int, other: int) -> bool:
        return self.stretches[max(one, other)].follows(self.stretches[min(one, other)])

    def _programs(self, one: int, other: int) -> str:
        first, second = sorted((self.stretches[one].program, self.stretches[other].program))
        return f"programs {first} and {second}"

    def _contain(self, at: Addresses, size: int) -> None:
        place = np.searchsorted(self._starts, at, "right") - 1
        within = (place >= 0) & (at + np.uint64(size) <= self._ends[place])
        self._allow(bool(within.all()), "a program leaves the memory that it was given")

    def _allow(self, right: bool, wrong: str) -> None:
        if not right:
            raise MemoryFaultError(f"{self.kernel}: {wrong}")


def _bits(values: npt.NDArray[Any]) -> Addresses:
    """Numbers of any type as their bits."""
    return np.ascontiguousarray(values).view(f"u{values.itemsize}").astype(np.uint64).reshape(-1)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first number, and of what comes after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _overlap(one: Addresses, other: Addresses) -> bool:
    if not len(one) or not len(other) or one.min() > other.max() or other.min() > one.max():
        return False
    return bool(np.isin(one, other).any())


def _found(at: Addresses, among: Addresses) -> npt.NDArray[np.int64]:
    """Where in `among` (ascending, with duplicates) there is any of `at`."""
    first, last = np.searchsorted(among, at, "left"), np.searchsorted(among, at, "right")
    there = last > first
    runs = [np.arange(begin, end) for begin, end in zip(first[there], last[there], strict=True)]
    return np.concatenate(runs) if runs else np.zeros(0, np.int64)


def check_memory() -> None:
    """Look at every launch of the interpreter from now on."""
    interpreter: Any = import_module("triton.runtime.interpreter")
    cuda, builder, executor = interpreter.tl.extra.cuda, interpreter.InterpreterBuilder, interpreter.GridExecutor
    begin, load, store = builder.set_grid_idx, builder.create_masked_load, builder.create_masked_store
    count, swap, run = builder.create_atomic_rmw, builder.create_atomic_cas, executor.__call__
    launch = Launch("nothing", [])

    def places(pointers: Any, mask: Any = None) -> tuple[Addresses, Addresses, int]:
        at = pointers.data if mask is None else pointers.data[mask.data.astype(bool)]
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        return pointers.data.reshape(-1), at.reshape(-1), size

    def begin_program(self: Any, *index: int) -> None:
        launch.begin()
        begin(self, *index)

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        launch.read(*places(pointers, mask))
        return load(self, pointers, mask, *rest, **named)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        launch.write(*places(pointers, mask), _bits(value.data[mask.data.astype(bool)]))
        return store(self, pointers, value, mask, *rest, **named)

    def atomic_rmw(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        launch.meet(*places(pointers, mask))
        return count(self, operation, pointers, value, mask, *rest)

    def atomic_cas(self: Any, pointers: Any, *rest: Any) -> Any:
        launch.meet(*places(pointers))
        return swap(self, pointers, *rest)

    def barrier(self: Any) -> None:
        launch.settle()

    def wait() -> None:
        launch.wait()

    def release() -> None:
        launch.release()

    def execute(self: Any, *args: Any, **options: Any) -> None:
        nonlocal launch
        tensors = [value for value in [*args, *options.values()] if isinstance(value, torch.Tensor)]
        early = "PDL" in self.arg_names
        launch = Launch(self.fn.__name__, tensors, launch if early else None)
        run(self, *args, **options | ({"PDL": True} if early else {}))
        launch.finish()

    builder.set_grid_idx, builder.create_barrier = begin_program, barrier
    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store
    builder.create_atomic_rmw, builder.create_atomic_cas = atomic_rmw, atomic_cas
    cuda.gdc_wait, cuda.gdc_launch_dependents = wait, release
    executor.__call__ = execute
