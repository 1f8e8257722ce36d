"""Reads the schedules that libtpu dumps: how often each cycle of a kernel runs, and what it uses.

A TPU core is told in the schedule what each of its units does in each cycle, and the file
`*-packed-bundles-post-ra.txt` has that schedule with all stalls in it: one bundle is one cycle.
(`*-final_bundles.txt` is no such thing: libtpu drops the empty bundles there, since the hardware
interlocks.) Which bundles run how often depends on the scalar unit alone, so `Program` runs the
scalar instructions that branches depend on: loops, pipeline stages, `pl.when` on program ids and on
prefetched scalars whose values are given come out exact. What depends on other data stays open, and
is either told by the caller or an error; nothing is guessed.

`*-pre-delay_hlo-static-per-bundle-utilization.txt` says for the same bundles what the units do. The
columns MATMUL, MATPUSH and XLU there count the cycles that a unit stays occupied.

Not in a schedule: waiting for HBM, instruction fetch, conflicts in VMEM, and starting the kernel.
`read_hlo` says what a compiled program runs beside its kernels.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import operator
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

# Goes to LIBTPU_INIT_ARGS; the other passes' dumps would be twenty times as large.
PASSES = "(packed-bundles-post-ra|post-bundle-packing-post-ra|static-per-bundle-utilization)"

_DELAY = 5  # bundles from a branch to where it leads: the ones in between run
_SMALL = 48  # cycles; blocks this small that depend on data are counted as run
_MOST_EVENTS = 20_000_000
_LANES = 128  # words of a row in scalar memory, if an array has rows


class ScheduleError(Exception):
    """The schedule does not say how often something runs, or is in an unknown form."""


class Pointer(NamedTuple):
    """A place in a memory. offset: in words, None if it is not known."""

    base: str
    offset: int | None


class _Op(NamedTuple):
    bundle: int
    dest: str | None
    code: str
    args: tuple
    guard: tuple[str, bool] | None  # (predicate, value with which this runs)
    otherwise: Any  # what dest becomes if it does not run
    is_core_id: bool
    index: int | None  # of the kernel's operand


class Branch(NamedTuple):
    """A jump from `bundle` + 5 to `target`, unless guard says otherwise."""

    bundle: int
    target: int
    guard: tuple[str, bool] | None

    @property
    def is_loop(self) -> bool:
        return self.target <= self.bundle

    @property
    def span(self) -> tuple[int, int]:
        """What a loop repeats, or a jump passes over."""
        end = self.bundle + _DELAY
        return (self.target, end) if self.is_loop else (end, self.target)


_BUNDLE = re.compile(r"^\s*(?:0x[0-9a-f]+|\d+)\s+(?:[A-Z]{2})?\s*:[\s>]*\{(.*)$")
_OP = re.compile(r"^(?:%(\w+) = )?([a-z][\w.]*)\b(.*)$", re.DOTALL)
_GUARD = re.compile(r"\((!?)%(\w+)(?:, ([^()]*))?\)")
_TOKEN = re.compile(r"\[?(#allocation\w+)\]?|%(\w+)|\$?(-?0x[0-9a-f]+|-?\d+)")


def read_bundles(text: str) -> list[str]:
    """The bundles of a `*-bundles*.txt`, one string each, without what is around them."""
    bundles: list[str] = []
    for line in text.splitlines():
        match = _BUNDLE.match(line)
        if match:
            bundles.append(match[1])
        elif bundles:  # a comment of several lines
            bundles[-1] += " " + line
    return bundles


def _token(text: str) -> Any:
    """A value: a number, a Pointer, or the name of a register's content."""
    match = _TOKEN.fullmatch(text.strip())
    if match is None:
        return None
    base, name, number = match.groups()
    if base:
        return Pointer(base, 0)
    return name if name else _signed(int(number, 0))


def _signed(x: int) -> int:
    return (x + 2**31) % 2**32 - 2**31


def _address(text: str) -> tuple:
    """The terms of an address in scalar memory."""
    return tuple(_token(term.strip().replace("#alloc", "[#alloc")) for term in text.split("+"))


def _parse(bundle: int, text: str) -> _Op | None:
    match = _OP.match(re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).strip())
    if match is None:
        return None
    dest, code, rest = match.groups()
    guard, otherwise = None, None
    found = _GUARD.search(rest)
    if found:
        guard = found[2], not found[1]
        otherwise = _token(found[3]) if found[3] else None
        rest = (rest[: found.start()] + " " + rest[found.end() :]).strip(" ,")
    index = re.search(r"index: (\d+), kind: input", rest)
    if code == "sld" or code == "sst":
        address, _, rest = rest.strip().removeprefix("[smem:[").partition("]]")
        if address.endswith("]"):  # `[smem:[#allocation3] + %s]` has never been seen
            return None
        args = (_address(address), _token(rest.strip(" ,")) if rest.strip(" ,") else None)
    else:
        if code.startswith("scalar_lea"):  # a third term names the array that it stays in
            rest = ",".join(rest.split(",")[:1] + [x.split("[")[0] for x in rest.split(",")[1:]])
        args = tuple(
            _token(m.group())
            for m in _TOKEN.finditer(rest.partition("[thread")[0] if "[shape" not in rest else "")
        )
    return _Op(
        bundle,
        dest,
        code,
        args,
        guard,
        otherwise,
        is_core_id="core id" in text,
        index=int(index[1]) if index else None,
    )


def _unsigned(f: Callable) -> Callable:
    return lambda *args: f(*(x % 2**32 for x in args))


_ARITHMETIC: dict[str, Callable] = {
    "sadd": operator.add,
    "ssub": operator.sub,
    "smul": operator.mul,
    "smulhi": _unsigned(lambda a, b: a * b >> 32),
    "sand": operator.and_,
    "sor": operator.or_,
    "sxor": operator.xor,
    "sshll": lambda a, b: a << (b % 32),
    "sshrl": _unsigned(lambda a, b: a >> (b % 32)),
    "sshra": lambda a, b: a >> (b % 32),
    "smin": min,
    "smax": max,
}
_COMPARE = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


def _logic(code: str, args: Sequence) -> bool | None:
    """por, pand and pnand, each of which one operand may decide."""
    decides = code == "por"
    if any(x is decides for x in args):
        result: bool | None = decides
    elif any(x is None for x in args):
        return None
    else:
        result = not decides
    return not result if code == "pnand" else result


def _compute(code: str, args: Sequence) -> Any:
    """The value of one scalar instruction, None where it is not known."""
    stem, _, kind = code.partition(".")
    if code in ("por", "pand", "pnand"):
        return _logic(code, args)
    if stem == "scalar_select":
        if args[0] is None:
            return args[1] if args[1] == args[2] else None
        return args[1] if args[0] else args[2]
    if stem in ("smov", "pmov", "int_to_ptr"):
        return args[-1]
    if stem in ("sadd", "ssub", "scalar_lea"):
        pointers = [x for x in args if isinstance(x, Pointer)]
        rest = [x for x in args if not isinstance(x, Pointer)]
        if pointers:
            base, offset = pointers[0]
            if len(pointers) > 1 or stem == "ssub" or offset is None or None in rest:
                return Pointer(base, None)
            return Pointer(base, offset + sum(rest))
    if any(x is None for x in args) or not args:
        return None
    if any(isinstance(x, Pointer) for x in args):
        # A shifted address is still one; comparing addresses decides bounds checks only.
        return Pointer(args[0].base, None) if stem == "sshll" else None
    if stem in ("pneg", "pxor"):
        return not args[0] if stem == "pneg" else bool(args[0]) != bool(args[1])
    if stem == "scmp":
        relation, domain, *_ = kind.split(".")
        compare = _COMPARE[relation]
        return (_unsigned(compare) if domain == "u32" else compare)(*args)
    if stem == "scalar_lea":
        return _signed(sum(args))
    function = _ARITHMETIC.get(stem)
    return _signed(function(*args)) if function and len(args) == 2 else None


@dataclasses.dataclass(frozen=True)
class Open:
    """A branch whose condition is data: a block that may be passed over, or a loop."""

    branch: Branch
    cycles: int  # of one pass

    def __str__(self) -> str:
        low, high = self.branch.span
        what = "loop" if self.branch.is_loop else "block"
        return f"{what} of {self.cycles} cycles at bundles {low:#x}-{high:#x}"


class Program:
    """A schedule whose branches can be followed."""

    def __init__(self, text: str):
        self.bundles = read_bundles(text)
        if not self.bundles:
            raise ScheduleError("no bundles: not a `*-packed-bundles-post-ra.txt` of libtpu")
        self.branches: dict[int, Branch] = {}
        ops: list[_Op] = []
        for i, bundle in enumerate(self.bundles):
            for part in bundle.rpartition("}")[0].split(";;") if bundle else ():
                if re.search(r"= [sp]|sst|sbr|smem|inlined_call|int_to_ptr", part) is None:
                    continue
                op = _parse(i, part)
                if op is not None and op.code.startswith("sbr"):
                    self._add_branch(op, part)
                elif op is not None:
                    ops.append(op)
        self._ops = self._needed(ops)
        ends = {b.bundle + _DELAY for b in self.branches.values()}
        ends |= {b.target for b in self.branches.values()}
        self._stops = sorted({*self._ops, *self.branches, *ends, len(self.bundles)})

    def _add_branch(self, op: _Op, part: str) -> None:
        target = re.search(r"target bundleno = (\d+)", part)
        if op.code != "sbr.rel" or target is None:
            raise ScheduleError(f"bundle {op.bundle:#x}: a branch of an unknown kind: {part!r}")
        if any(abs(op.bundle - b) < _DELAY for b in self.branches):
            raise ScheduleError(f"bundle {op.bundle:#x}: a branch right behind another one")
        self.branches[op.bundle] = Branch(op.bundle, int(target[1]), op.guard)

    def _needed(self, ops: list[_Op]) -> dict[int, list[_Op]]:
        """What the conditions of branches depend on, by bundle, in an order to run it in."""
        by_dest: dict[str, _Op] = {}
        for op in ops:
            if op.dest is not None and by_dest.setdefault(op.dest, op) is not op:
                raise ScheduleError(f"bundle {op.bundle:#x}: {op.dest} is made a second time")
        stores: dict[str, list[_Op]] = {}
        for op in ops:
            if op.code == "sst" or "_to_smem" in op.code:
                stores.setdefault(_slot(op), []).append(op)
        todo: list[Any] = [b.guard[0] for b in self.branches.values() if b.guard]
        needed: set[_Op] = set()
        while todo:
            item = todo.pop()
            op = by_dest.get(item) if isinstance(item, str) else item
            if not isinstance(op, _Op) or op in needed:
                continue
            needed.add(op)
            todo += [x for x in (*op.args, op.otherwise) if isinstance(x, str)]
            todo += [op.guard[0]] if op.guard else []
            if op.code in ("sld", "sst"):
                todo += [x for x in op.args[0] if isinstance(x, str)]
            if op.code == "sld":
                todo += stores.get(_slot(op), [])
        result: dict[int, list[_Op]] = {}
        for op in sorted(needed, key=lambda op: (op.bundle, op.code != "sphi")):
            result.setdefault(op.bundle, []).append(op)
        return {i: _ordered(bundle) for i, bundle in result.items()}

    def run(
        self,
        *,
        core: int = 0,
        scalars: Mapping[int, np.ndarray] | None = None,
        decided: Mapping[int, float] | None = None,
    ) -> tuple[np.ndarray, list[Open]]:
        """How often each bundle runs, and the branches that depend on data.

        Args:
            core: the one of a chip whose cores share a kernel (v5p).
            scalars: by operand, the values of prefetched scalars.
            decided: by bundle of a branch on data, which share of times the block behind it runs,
                or how often the loop before it. Others: once, and they are reported.
        """
        return _Run(self, core, scalars or {}, decided or {}).result()


def _slot(op: _Op) -> str:
    """The compiler's own slot that a load or store is of; one name for everything else."""
    base = op.args[0][0] if op.code in ("sld", "sst") else None
    return base.base if isinstance(base, Pointer) and base.base.endswith("_spill") else ""


def _ordered(ops: list[_Op]) -> list[_Op]:
    """A bundle's instructions such that what one makes is there for the others."""
    made = {op.dest for op in ops}
    result: list[_Op] = []
    while ops:
        waiting = [
            op
            for op in ops
            if op.code != "sphi"
            and any(x in made for x in itertools.chain(op.args, op.guard or ()) if x != op.dest)
        ]
        ready = [op for op in ops if op not in waiting] or ops[:1]
        result += ready
        made -= {op.dest for op in ready}
        ops = [op for op in ops if op not in ready]
    return result


class _Run:
    """One run of a program's scalar instructions."""

    def __init__(self, program: Program, core: int, scalars: Mapping, decided: Mapping):
        self.program, self.core, self.decided = program, core, decided
        self.values: dict[str, Any] = {}
        self.written: dict[str, int] = {}  # when, for phis
        self.memory: dict[str, dict[int, Any]] = {
            f"operand {i}": _words(values) for i, values in scalars.items()
        }
        self.time = 0
        self.open: dict[int, Branch] = {}

    def value(self, x: Any) -> Any:
        return self.values.get(x) if isinstance(x, str) else x

    def result(self) -> tuple[np.ndarray, list[Open]]:
        program = self.program
        stops, size = program._stops, len(program.bundles)
        change = np.zeros(size + 1)
        weight = 1.0
        change[0] += weight
        jump: tuple[int, int] | None = None  # (from, to) of a branch that is taken
        partly: list[tuple[int, float]] = []  # (end, weight behind it) of blocks on data
        laps: dict[int, int] = {}
        stop = 0
        for self.time in range(_MOST_EVENTS):
            at = stops[stop]
            if jump and at == jump[0]:
                _, at = jump
                jump = None
                change[stops[stop]] -= weight
                change[at] += weight
                if partly and at > partly[-1][0]:
                    raise ScheduleError(f"a branch to {at:#x} leaves a block that depends on data")
                stop = bisect.bisect_left(stops, at)
            while partly and at == partly[-1][0]:
                _, before = partly.pop()
                change[at] += before - weight
                weight = before
            if at >= size:
                break
            for op in program._ops.get(at, ()):
                self.execute(op)
            branch = program.branches.get(at)
            if branch:
                taken = self.condition(branch.guard)
                if taken is None:
                    self.open[at] = branch
                    often = self.decided.get(at, 1)
                    if branch.is_loop:
                        laps[at] = laps.get(at, 0) + 1
                        taken = laps[at] < often
                        if not taken:
                            laps[at] = 0
                    elif often in (0, 1):
                        taken = often == 0
                    else:
                        partly.append((branch.target, weight))
                        low = branch.bundle + _DELAY
                        change[low] += weight * often - weight
                        weight *= often
                if taken:
                    jump = branch.bundle + _DELAY, branch.target
            stop += 1
        else:
            raise ScheduleError(f"still running after {_MOST_EVENTS} scalar steps")
        counts = np.cumsum(change)[:size]
        open_ = [
            Open(branch, branch.span[1] - branch.span[0]) for _, branch in sorted(self.open.items())
        ]
        return counts, open_

    def condition(self, guard: tuple[str, bool] | None) -> bool | None:
        if guard is None:
            return True
        value = self.value(guard[0])
        return None if value is None else bool(value) == guard[1]

    def execute(self, op: _Op) -> None:
        runs = self.condition(op.guard)
        if op.code == "sst":
            if runs is not False:
                self.store(op, runs)
            return
        if "_to_smem" in op.code:
            if runs is not False:
                self.copy(op, runs)
            return
        if runs is False and op.otherwise is None:
            return
        if op.code == "sphi":
            value = max(op.args, key=lambda x: self.written.get(x, -1))
            result = self.value(value)
        elif runs is False:
            result = self.value(op.otherwise)
        else:
            result = self.computed(op)
            if runs is None and op.otherwise is not None:
                result = result if result == self.value(op.otherwise) else None
        assert op.dest is not None
        self.values[op.dest] = result
        self.written[op.dest] = self.time

    def computed(self, op: _Op) -> Any:
        if op.code == "sld":
            if op.is_core_id:
                return self.core
            place = self.place(op)
            if place is None or place.offset is None:
                return None
            return self.memory.get(place.base, {}).get(place.offset)
        if op.code.startswith("inlined_call_operand"):
            operand = Pointer(f"operand {op.index}", 0)
            in_register = "." not in op.code
            return self.memory.get(operand.base, {}).get(0) if in_register else operand
        return _compute(op.code, [self.value(x) for x in op.args])

    def place(self, op: _Op) -> Pointer | None:
        terms = [self.value(x) for x in op.args[0]]
        value = _compute("sadd", terms) if len(terms) > 1 else terms[0]
        return value if isinstance(value, Pointer) else None

    def store(self, op: _Op, certain: bool | None) -> None:
        place, value = self.place(op), self.value(op.args[1])
        if place is None:  # anywhere, but for the compiler's own
            self.memory = {k: v for k, v in self.memory.items() if k.endswith("_spill")}
        elif place.offset is None:
            self.memory.pop(place.base, None)
        else:
            row = self.memory.setdefault(place.base, {})
            row[place.offset] = value if certain or row.get(place.offset) == value else None

    def copy(self, op: _Op, certain: bool | None) -> None:
        """A DMA to scalar memory; a whole operand if it has no strides."""
        source, target = (self.value(op.args[i]) for i in (0, 2))
        if not isinstance(target, Pointer):
            self.memory = {k: v for k, v in self.memory.items() if k.endswith("_spill")}
            return
        self.memory.pop(target.base, None)
        if certain and isinstance(source, Pointer) and len(op.args) == 4:
            self.memory[target.base] = dict(self.memory.get(source.base, {}))


def _words(values: np.ndarray) -> dict[int, int]:
    """Integers as they lie in scalar memory: each row begins at a multiple of 128 words."""
    lines = np.atleast_2d(values)
    if lines.ndim > 2 or (len(lines) > 1 and lines.shape[1] > _LANES):
        return {}  # such layouts have not been seen
    return {i * _LANES + j: int(x) for i, line in enumerate(lines) for j, x in enumerate(line)}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What a kernel's schedule says about one call.

    Attributes:
        cycles: of each core that the kernel is cut over.
        use: by column of libtpu's utilization, the sum over the cycles of the busiest core.
        capacity: by column, the most in a cycle.
        vmem: bytes.
        loop: bundles of the loop that most of the time is spent in.
        counts: how often each bundle runs.
        rows: utilization per bundle.
    """

    cycles: tuple[float, ...]
    use: dict[str, float]
    capacity: dict[str, int]
    vmem: int
    loop: tuple[int, int]
    counts: np.ndarray
    rows: np.ndarray

    def share(self, column: str) -> float:
        """How much of a unit's time, or of its slots, is used."""
        return self.use[column] / (max(self.cycles) * self.capacity[column])

    def phases(self, windows: int) -> list[tuple[float, dict[str, float]]]:
        """The main loop cut into windows of equal time: (cycles, share of each column)."""
        low, high = self.loop
        passed = np.concatenate([[0.0], np.cumsum(self.counts[low:high])])
        edges = np.searchsorted(passed, np.linspace(0, passed[-1], windows + 1))
        result = []
        for a, b in itertools.pairwise(edges + low):
            counts = self.counts[a:b]
            used = counts @ self.rows[a:b] / max(counts.sum(), 1)
            shares = used / np.array(list(self.capacity.values()))
            result.append((counts.sum(), dict(zip(self.capacity, shares, strict=True))))
        return result


def _read_use(text: str) -> tuple[list[str], list[int], np.ndarray]:
    head, _, body = text.partition("== UTILIZATION:")
    lines = head.strip().splitlines()
    columns = [name.strip() for name in lines[1].split(",")]
    capacity = [int(x) for x in lines[2].split()]
    rows = np.array([[int(x) for x in line.split()] for line in body.split("\n") if line.strip()])
    if rows.ndim != 2 or rows.shape[1] != len(columns) or len(capacity) != len(columns):
        raise ScheduleError("a per-bundle utilization in an unknown form")
    return columns, capacity, rows


def read_kernel(
    dump: pathlib.Path,
    name: str,
    *,
    cores: int = 1,
    scalars: Mapping[int, np.ndarray] | None = None,
    shares: Sequence[float] = (),
    trips: Sequence[int] = (),
) -> Kernel:
    """Reads what libtpu dumped for one HLO instruction.

    Args:
        dump: the folder that --xla_jf_dump_to named.
        name: of the instruction.
        cores: that a chip's kernels are cut over; a part for each is run.
        scalars: by operand, the values of prefetched scalars.
        shares: of times that each block on data runs, for blocks above 48 cycles in their order.
        trips: of each loop on data, in their order.

    Raises:
        ScheduleError: there is no such dump, its form is unknown, or there are other numbers of
            blocks and loops on data than `shares` and `trips` have.
    """

    def text(tail: str) -> str:
        file_name = re.compile(rf"\d+-{re.escape(name)}-\d+-{tail}\.txt")
        found = [path for path in dump.iterdir() if file_name.fullmatch(path.name)]
        if len(found) != 1:
            raise ScheduleError(f"{len(found)} dumps of {tail} for {name} in {dump}, expected one")
        return found[0].read_text()

    program = Program(text("packed-bundles-post-ra"))
    columns, capacity, rows = _read_use(text("pre-delay_hlo-static-per-bundle-utilization"))
    if len(rows) != len(program.bundles):
        raise ScheduleError(f"{name}: {len(program.bundles)} bundles, but {len(rows)} rows of use")
    runs = [_decide(program, core, scalars, shares, trips, name) for core in range(cores)]
    counts = max(runs, key=np.sum)
    loops = [b.span for b in program.branches.values() if b.is_loop]
    loop = max(loops, key=lambda s: (counts[slice(*s)].sum(), s[0]), default=(0, len(counts)))
    vmem = [
        int(m[1], 0) + int(m[2], 0)
        for m in re.finditer(
            r"space=vmem, size = (\w+), offset = (\w+)", text("post-bundle-packing-post-ra")
        )
    ]
    return Kernel(
        cycles=tuple(float(run.sum()) for run in runs),
        use=dict(zip(columns, (counts @ rows).tolist(), strict=True)),
        capacity=dict(zip(columns, capacity, strict=True)),
        vmem=max(vmem, default=0),
        loop=loop,
        counts=counts,
        rows=rows,
    )


def _decide(
    program: Program,
    core: int,
    scalars: Mapping[int, np.ndarray] | None,
    shares: Sequence[float],
    trips: Sequence[int],
    name: str,
) -> np.ndarray:
    counts, open_ = program.run(core=core, scalars=scalars)
    blocks = [x for x in open_ if not x.branch.is_loop and x.cycles >= _SMALL]
    loops = [x for x in open_ if x.branch.is_loop]
    if core and not blocks and not loops:  # a core without work meets none of them
        return counts
    if len(blocks) != len(shares) or len(loops) != len(trips):
        raise ScheduleError(
            f"{name}: {len(blocks)} blocks and {len(loops)} loops depend on data, expected "
            f"{len(shares)} and {len(trips)}: " + ("; ".join(map(str, blocks + loops)) or "none")
        )
    if not blocks and not loops:
        return counts
    decided = {x.branch.bundle: y for x, y in zip(blocks, shares, strict=True)}
    decided |= {x.branch.bundle: y for x, y in zip(loops, trips, strict=True)}
    counts, after = program.run(core=core, scalars=scalars, decided=decided)
    new = [x for x in after if x.branch.bundle not in decided and x not in open_]
    if any(x.branch.is_loop or x.cycles >= _SMALL for x in new):
        raise ScheduleError(f"{name}: what depends on data changes with the shares: {new}")
    return counts


_BITS = {"pred": 8, "bf16": 16}
_SKIPPED = ("parameter", "constant", "bitcast", "tuple", "get-tuple-element", "iota")
_INSTRUCTION = re.compile(
    r"^ +(?:ROOT )?%?([\w.\-]+) = (\((?:[^()]|\([^()]*\))*\)|\S+) ([a-z][\w\-]*)\((.*)$"
)


def _hbm_bytes(type_: str) -> int:
    total = 0
    for name, dims, layout in re.findall(r"\b([a-z]+\w*)\[([\d,]*)\](\{[^}]*\})?", type_):
        if "S(" in layout:  # not in HBM
            continue
        width = re.match(r"[a-z]+(\d+)", name)
        bits = _BITS.get(name) or int(width[1] if width else 0)
        total += math.prod(int(n) for n in dims.split(",") if n) * bits // 8
    return total


def read_hlo(text: str) -> list[tuple[str, bool, int]]:
    """What a program's entry runs: (name, is a kernel, bytes of operands and results in HBM)."""
    entry = text[text.index("\nENTRY ") :]
    sizes: dict[str, int] = {}
    found = []
    for line in re.sub(r"/\*.*?\*/", "", entry).splitlines():
        match = _INSTRUCTION.match(line)
        if match is None:
            continue
        name, type_, opcode, rest = match.groups()
        sizes[name] = _hbm_bytes(type_)
        if opcode in _SKIPPED or opcode.endswith(("-done", "-update")):
            continue
        operands = dict.fromkeys(re.findall(r"%([\w.\-]+)", rest.partition(")")[0]))
        moved = sizes[name]
        if not opcode.endswith("-start"):  # has its operand among its results
            moved += sum(sizes.get(operand, 0) for operand in operands)
        found.append((name, '"tpu_custom_call"' in rest, moved))
    return found
