"""The rules of docs/kernels.md, each a function that names what breaks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .code import Instruction, Program
from .compiling import SHARED_LIMIT, Compiled
from .measures import Step, in_source, k_loops, measure, step_of, system_wide, tile_stores

#: The most instructions of a standard case's K step.
ABSOLUTE = {"sm_90": 90, "sm_100": 95}
ABSOLUTE_36 = {"sm_90": 90, "sm_100": 100}
#: How many more instructions than the plain product's a K step may have.
MARGIN = 3

Check = Callable[[Compiled, Compiled | None], Iterator[str]]
CHECKS: dict[str, Check] = {}


def _check(name: str) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        CHECKS[name] = check
        return check

    return register


def _has(*tags: str) -> Callable[[Instruction], bool]:
    return lambda instruction: bool(instruction.tags & set(tags))


def violations(compiled: Compiled, plain: Compiled | None) -> dict[str, list[str]]:
    """Check -> what breaks it, for those that are broken.

    Args:
        plain: the case without signals that this one is compared with, for the same chip.
    """
    found = {name: list(check(compiled, plain)) for name, check in CHECKS.items()}
    return {name: sentences for name, sentences in found.items() if sentences}


@_check("waits")
def waits(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """No acquire got lost: neither one of the source's, nor one of Triton's own code."""
    found, expected = _counts(compiled, "acquire", compiled.case.waits)
    if found < expected:
        yield f"{found} acquires at system scope, expected at least {expected}"


@_check("signals")
def signals(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """No release got lost."""
    # A wait that gives up signals it to the host.
    expected_here = compiled.case.signals + bool(compiled.case.waits)
    found, expected = _counts(compiled, "release", expected_here)
    if found < expected:
        yield f"{found} releases at system scope, expected at least {expected}"


def _counts(compiled: Compiled, order: str, declared: int) -> tuple[int, int]:
    found = len(system_wide(compiled.program, order))
    return found, max(declared, in_source(compiled, order))


@_check("barrier before a release")
def barrier_before_release(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """All threads' stores are behind a block barrier before one thread's release."""
    program = compiled.program
    for release in program.tagged("release"):
        early = program.before(release, _has("barrier"), _has("store", "bulk-store"))
        for store in early:
            yield _pair(program, store, "is not separated by a barrier from", release)


@_check("barrier after an acquire")
def barrier_after_acquire(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """No thread reads on before the one that acquires has found the flag."""
    program = compiled.program
    for acquire in program.tagged("acquire"):
        early = program.after(acquire, _has("barrier"), _plain_read)
        for load in early:
            yield _pair(program, load, "is not separated by a barrier from", acquire)


def _plain_read(instruction: Instruction) -> bool:
    return bool(instruction.tags & {"load", "copy"}) and "strong" not in instruction.tags


@_check("copies behind the wait")
def copies_behind_wait(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """No asynchronous copy is under way while a flag is awaited: it could be of what comes."""
    if not compiled.nvidia:
        return  # loads into registers, which LLVM orders after an acquire

    def drained(instruction: Instruction) -> bool:
        return "pending" in instruction.tags and instruction.number == 0

    program = compiled.program
    for acquire in system_wide(program, "acquire"):
        for copy in program.before(acquire, drained, _has("copy")):
            yield _pair(program, copy, "may be under way at", acquire)


@_check("stores behind the barrier")
def stores_drained(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """On AMD a barrier does not wait for stores: each wave must have waited for its own."""
    if compiled.nvidia:
        return
    program = compiled.program
    data = set(tile_stores(program))
    for release in system_wide(program, "release"):
        for barrier in program.nearest_before(release, _has("barrier")):
            for store in program.before(barrier, _has("drained", "release"), _has("store")):
                if store in data:
                    yield _pair(program, store, "may be under way at the barrier before", release)


@_check("no bulk stores")
def no_bulk_stores(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """A signal can overtake a bulk store, whose usual wait is only for its source."""
    program = compiled.program
    if system_wide(program, "release"):
        for store in program.tagged("bulk-store"):
            yield f"{program.instructions[store]} in a kernel that signals"
        if "cp.async.bulk.wait_group.read" in compiled.assembly:
            yield "waits for the source of a bulk store alone (wait_group.read)"


@_check("16-byte stores")
def wide_stores(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """Where a case stores what is left over singly, the same line must store 16 bytes as well."""
    if compiled.case.numbers:
        return
    program = compiled.program
    stores = [program.instructions[at] for at in tile_stores(program)]
    wide = {store.place for store in stores if store.size == 16}
    for store in stores:
        if store.size < 16 and not (compiled.case.rest and store.place in wide):
            yield f"{store.size} bytes a thread: {store}"


@_check("no spills")
def no_spills(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    spills = measure(compiled).spills
    if spills:
        yield f"{spills} registers or instructions"


@_check("shared memory")
def shared_memory(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    limit = SHARED_LIMIT[compiled.chip]
    if compiled.shared > limit:
        yield f"{compiled.shared} bytes, at most {limit}"


@_check("tensor cores")
def tensor_cores(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    if compiled.case.on_tensor_cores and not k_loops(compiled.program):
        yield "no loop with matrix instructions"


@_check("copies in the K loop")
def copies(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    for step in _steps(compiled):
        if not step.copies:
            yield "none"


@_check("prefetch depth")
def prefetch_depth(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    stages = compiled.case.tiles(compiled.chip).stages
    for step in _steps(compiled):
        if step.depth < stages - 1:
            yield f"{step.depth} steps with {stages} stages"


@_check("one group in flight")
def one_group_in_flight(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """On sm_90 the step before may still be multiplying while this one starts."""
    if compiled.chip != "sm_90":
        return
    program = compiled.program
    for loop in k_loops(program):
        way = [program.instructions[at] for at in program.hot_path(loop, "matrix")]
        waits = [i.text for i in way if i.opcode == "WARPGROUP.DEPBAR.LE"]
        if waits != ["WARPGROUP.DEPBAR.LE gsb0, 0x1"]:
            yield f"waits for products in the loop: {waits or 'none'}"


@_check("K loop free of flags")
def free_k_loop(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    """A wait, a signal, a fence or a count in the K loop turns pipelining off, or stalls it."""
    for loop in k_loops(compiled.program):
        for instruction in compiled.program.of(loop.blocks):
            wide = "fence" in instruction.tags and instruction.scope != "cta"
            if wide or instruction.tags & {"strong", "atomic", "acquire", "release"}:
                yield str(instruction)


@_check("K loop against the plain product")
def against_plain(compiled: Compiled, plain: Compiled | None) -> Iterator[str]:
    if plain is None:
        return
    mine, theirs = measure(compiled).step, measure(plain).step
    if mine is None or theirs is None:
        if compiled.case.on_tensor_cores:
            yield "one of the two has no K loop"
        return
    if mine.instructions > theirs.instructions + MARGIN:
        yield f"{mine.instructions} instructions, the plain product has {theirs.instructions}"
    if mine.barriers > theirs.barriers:
        yield f"{mine.barriers} barriers, the plain product has {theirs.barriers}"


@_check("absolute length")
def absolute_length(compiled: Compiled, _: Compiled | None) -> Iterator[str]:
    table = ABSOLUTE_36 if compiled.triton.startswith("3.6.") else ABSOLUTE
    limit = table.get(compiled.chip)
    if limit is None or not compiled.case.standard:
        return
    for step in _steps(compiled):
        if step.instructions > limit:
            yield f"{step.instructions} instructions a step, at most {limit}"


def _steps(compiled: Compiled) -> Iterator[Step]:
    for loop in k_loops(compiled.program):
        yield step_of(compiled, loop)


def _pair(program: Program, first: int, relation: str, second: int) -> str:
    return f"{program.instructions[first]} {relation} {program.instructions[second]}"
