#!/usr/bin/env python3
"""GraphEP in graphs that PyTorch captures: torch.cuda.graph, torch's stream, torch's tensors.

    torch_capture.py LIBRARY

LIBRARY is libgraph_ep_test_engine.so. Ranks are threads of this process, one for each of at most two
GPUs. Says what it did, a line for each check, and exits with 1 if one of them failed. Without PyTorch or
a GPU it says that it is skipped.

The experts are torch's too: each row is multiplied by a number of its expert, by kernels that torch
queues between dispatch and combine.
"""

import ctypes
import gc
import sys
import threading
import time
import traceback

try:
    import torch
except ImportError as error:
    print(f"torch_capture: skipped: {error}")
    sys.exit(0)

HIDDEN, EXPERTS_A_RANK, TOP_K, TOKENS, ALIGNMENT = 64, 4, 2, 32, 4
PATIENCE = 30.0


class Sizes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32)
                for name in ("hidden", "experts", "top_k", "max_tokens", "capacity")]


class Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("tokens", "ids", "weights", "output")] + [
        ("count", ctypes.c_uint32), ("rounds", ctypes.c_uint32)]


class Report(ctypes.Structure):
    _fields_ = [("step", ctypes.c_uint32), ("overflowed", ctypes.c_uint32),
                ("dropped", ctypes.c_uint64), ("windows", ctypes.c_uint32),
                ("replays", ctypes.c_uint32), ("capacity", ctypes.c_uint32),
                ("stale_rank", ctypes.c_uint32), ("recorded", ctypes.c_uint64),
                ("now", ctypes.c_uint64)]


Plain = ctypes.CFUNCTYPE(ctypes.c_int32)
Experts = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64,
                           ctypes.c_uint32, ctypes.c_uint64)


class Callbacks(ctypes.Structure):
    _fields_ = [("capture", Plain), ("launch", Plain), ("experts", Experts)]


def load(path):
    library = ctypes.CDLL(path)
    rank, report = ctypes.c_void_p, ctypes.POINTER(Report)
    for name, result, arguments in (
        ("gep_error", ctypes.c_char_p, []),
        ("gep_join", rank, [ctypes.c_uint32] * 3 + [ctypes.c_void_p, Sizes]),
        ("gep_leave", None, [rank]),
        ("gep_record", ctypes.c_int32, [rank, Layer, Callbacks]),
        ("gep_replayed", ctypes.c_uint32, [rank]),
        ("gep_wait", ctypes.c_int32, [rank, ctypes.c_uint32, report]),
        ("gep_runner", ctypes.c_int32, [rank, Callbacks, ctypes.c_uint32]),
        ("gep_run", ctypes.c_int32, [rank, report]),
        ("gep_set_capacity", ctypes.c_int32, [rank, ctypes.c_uint32]),
        ("gep_pushes", ctypes.c_int32, [rank]),
        ("gep_released", ctypes.c_uint64, []),
    ):
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


class Memory:
    """Device memory of somebody else's, for torch.as_tensor."""

    def __init__(self, address, shape, kind):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": shape, "typestr": kind, "version": 3}


def fit(world):
    """Enough rows for anything."""
    return (world * TOKENS * TOP_K + EXPERTS_A_RANK * (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT


class Rank:
    """One rank: torch's stream and tensors, and the group's."""

    def __init__(self, library, world, rank, capacity):
        self.library, self.world, self.rank = library, world, rank
        self.device = torch.device("cuda", rank)
        torch.cuda.set_device(self.device)
        self.stream = torch.cuda.Stream(self.device)
        self.experts = EXPERTS_A_RANK * world
        sizes = Sizes(HIDDEN, self.experts, TOP_K, TOKENS, capacity)
        self.handle = library.gep_join(world, rank, rank, self.stream.cuda_stream, sizes)
        self.check(0 if self.handle else -1)
        with torch.cuda.stream(self.stream):
            self.tokens = torch.zeros(TOKENS, HIDDEN, device=self.device)
            self.output = torch.zeros(TOKENS, HIDDEN, device=self.device)
            self.ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int32, device=self.device)
            self.weights = torch.zeros(TOKENS, TOP_K, device=self.device)
            # What an expert does: its rows times this. Rows behind the last expert's are anything.
            own = torch.arange(EXPERTS_A_RANK, device=self.device) + EXPERTS_A_RANK * rank
            self.factors = torch.cat([own + 1.0, torch.zeros(1, device=self.device)])
            most = fit(world)
            self.positions = torch.arange(most, dtype=torch.int32, device=self.device)
            self.of_row = torch.zeros(most, dtype=torch.int64, device=self.device)
            self.factor_of_row = torch.zeros(most, device=self.device)
            # Once without a graph, so that nothing has to be loaded during a capture.
            rows, outputs = (torch.zeros(most, HIDDEN, device=self.device) for _ in range(2))
            ends = torch.zeros(EXPERTS_A_RANK, dtype=torch.int32, device=self.device)
            self.multiply(rows, outputs, ends)
            self.output.fill_(-1.0)
            self.result = self.output * 1.0
        self.stream.synchronize()
        # Kept alive: the library calls them.
        self.on_capture, self.on_launch = Plain(self.capture), Plain(self.launch)
        self.on_experts = Experts(self.queue_experts)
        self.callbacks = Callbacks(self.on_capture, self.on_launch, self.on_experts)
        self.graph, self.rounds, self.captures, self.mode = None, False, 0, "thread_local"

    def check(self, code, expected=0):
        if code != expected:
            raise RuntimeError(f"rank {self.rank}: {code}: {self.library.gep_error().decode()}")

    def queue_experts(self, rows, outputs, offsets, limit, stream):
        """Called while the step is recorded: torch queues its kernels on the stream that is given."""
        try:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream, self.device)):
                kind = "<f4"
                rows = torch.as_tensor(Memory(rows, (limit, HIDDEN), kind), device=self.device)
                outputs = torch.as_tensor(Memory(outputs, (limit, HIDDEN), kind), device=self.device)
                ends = torch.as_tensor(Memory(offsets + 4, (EXPERTS_A_RANK,), "<i4"),
                                       device=self.device)
                self.multiply(rows, outputs, ends)
            return 0
        except Exception:
            traceback.print_exc()
            return 1

    def multiply(self, rows, outputs, ends):
        """Each row by the number of its expert. Allocates nothing: a loop's body takes no allocation."""
        limit = rows.shape[0]
        of_row, factor = self.of_row[:limit], self.factor_of_row[:limit]
        torch.bucketize(self.positions[:limit], ends, right=True, out=of_row)
        torch.index_select(self.factors, 0, of_row, out=factor)
        torch.mul(rows, factor.unsqueeze(1), out=outputs)

    def record(self):
        layer = Layer(self.tokens.data_ptr(), self.ids.data_ptr(), self.weights.data_ptr(),
                      self.output.data_ptr(), TOKENS, int(self.rounds))
        self.check(self.library.gep_record(self.handle, layer, self.callbacks))

    def capture(self):
        """Captures the step into a graph of torch's, with work of torch's before and after."""
        try:
            self.graph = None
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=self.stream, capture_error_mode=self.mode):
                self.output.fill_(-1.0)
                self.record()
                self.result = self.output * 1.0
            self.graph, self.captures = graph, self.captures + 1
            return 0
        except Exception:
            traceback.print_exc()
            return 1

    def launch(self):
        with torch.cuda.stream(self.stream):
            self.graph.replay()
        return 0

    def write(self, step, skewed=False):
        """Inputs of a step, and what has to come of them."""
        generator = torch.Generator().manual_seed(1000 * step + self.rank)
        tokens = torch.randn(TOKENS, HIDDEN, generator=generator)
        weights = torch.rand(TOKENS, TOP_K, generator=generator)
        if skewed:
            ids = torch.tensor([[0, 1]] * TOKENS, dtype=torch.int32)
        else:
            ids = torch.stack([torch.randperm(self.experts, generator=generator)[:TOP_K]
                               for _ in range(TOKENS)]).to(torch.int32)
        with torch.cuda.stream(self.stream):
            self.tokens.copy_(tokens)
            self.weights.copy_(weights)
            self.ids.copy_(ids)
        self.stream.synchronize()
        factors = (weights * (ids + 1.0)).sum(1, keepdim=True)
        return tokens * factors

    def verify(self, expected, what):
        self.stream.synchronize()
        torch.testing.assert_close(self.result.cpu(), expected, rtol=1e-5, atol=1e-5,
                                   msg=lambda text: f"{what}: {text}")

    def wait(self, expected=0):
        """The record of a launch that torch has just made."""
        report = Report()
        step = self.library.gep_replayed(self.handle)
        self.check(self.library.gep_wait(self.handle, step, ctypes.byref(report)), expected)
        assert report.step == step, (report.step, step)
        return report

    def run(self):
        report = Report()
        self.check(self.library.gep_run(self.handle, ctypes.byref(report)))
        return report

    def close(self):
        self.graph = None
        self.library.gep_leave(self.handle)


def settled(library):
    """How much graphs have let go, when no more comes of those that are gone already."""
    last, since = library.gep_released(), time.monotonic()
    while time.monotonic() - since < 0.3:
        time.sleep(0.01)
        now = library.gep_released()
        if now != last:
            last, since = now, time.monotonic()
    return last


def clean(rank, meet):
    """Replays with other routing each time, in the modes of capture that torch offers."""
    for mode in ("thread_local", "relaxed", "global"):
        rank.mode = mode
        # While one captures in the last mode, torch makes no call on another thread that the mode forbids.
        for turn in range(rank.world):
            meet()
            assert turn != rank.rank or rank.capture() == 0
        meet()
        for step in range(4):
            expected = rank.write(step)
            meet()
            rank.launch()
            report = rank.wait()
            assert (report.overflowed, report.dropped) == (0, 0)
            rank.verify(expected, f"{mode}, step {step}")


def rounds(rank, meet):
    """A loop on the device, with torch's kernels in its body."""
    rank.rounds = True
    assert rank.capture() == 0
    meet()
    windows = 0
    for step in range(4):
        expected = rank.write(step, skewed=step % 2 == 1)
        meet()
        rank.launch()
        report = rank.wait()
        windows = max(windows, report.windows)
        assert report.dropped == 0
        rank.verify(expected, f"step {step}")
    rank.rounds = False
    # Both hot experts are on the first rank.
    assert rank.rank != 0 or windows > 1, windows


def overflow(rank, meet):
    """A step that overflows is captured again by torch, by the runner's word, and replayed."""
    rank.check(rank.library.gep_runner(rank.handle, rank.callbacks, 0))
    replays = []
    for step in range(4):
        expected = rank.write(step, skewed=step == 1)
        meet()
        report = rank.run()
        assert report.dropped == 0
        replays.append(report.replays)
        rank.verify(expected, f"step {step}")
    assert 1 in replays[:2] and replays[2:] == [0, 0], replays
    assert rank.captures >= 2, rank.captures


def stale(rank, meet):
    """A graph that torch launches after the capacity has changed on one rank is told to all."""
    assert rank.capture() == 0
    meet()
    last = rank.world - 1
    if rank.rank == last:
        # As many rows as before, but another generation.
        rank.check(rank.library.gep_set_capacity(rank.handle, fit(rank.world)))
    for step in range(2):
        rank.write(step)
        meet()
        rank.launch()
        report = rank.wait(expected=1)
        assert (report.stale_rank, report.recorded, report.now) == (last, 1, 2), (
            report.stale_rank, report.recorded, report.now)
    meet()
    assert rank.capture() == 0
    expected = rank.write(7)
    meet()
    rank.launch()
    rank.wait()
    rank.verify(expected, "captured again")


def kept(rank, meet):
    """What torch's graph uses is kept by it, and given back when it is gone."""
    before = settled(rank.library)
    meet()
    assert rank.capture() == 0
    meet()
    expected = rank.write(3)
    meet()
    rank.launch()
    rank.wait()
    rank.verify(expected, "kept")
    assert rank.library.gep_released() == before, "given back while graphs are there"
    meet()
    rank.graph = None
    gc.collect()
    meet()
    start = time.monotonic()
    while rank.library.gep_released() < before + rank.world and time.monotonic() - start < PATIENCE:
        time.sleep(0.001)
    assert rank.library.gep_released() == before + rank.world, (rank.library.gep_released(), before)
    meet()


def on_ranks(library, world, check, capacity):
    barrier = threading.Barrier(world)
    failures = []

    def body(number):
        try:
            rank = Rank(library, world, number, capacity)
            barrier.wait(PATIENCE)
            check(rank, lambda: barrier.wait(PATIENCE))
            barrier.wait(PATIENCE)
            rank.stream.synchronize()
            pushes = library.gep_pushes(rank.handle)
            rank.close()
            if number == 0:
                print(f"  ranks {'push' if pushes else 'pull'}")
        except Exception:
            barrier.abort()
            failures.append(f"rank {number}:\n{traceback.format_exc()}")

    threads = [threading.Thread(target=body, args=(number,)) for number in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


def main():
    if not torch.cuda.is_available():
        print("torch_capture: skipped: torch finds no GPU")
        return 0
    library = load(sys.argv[1])
    world = min(2, torch.cuda.device_count())
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, {world} ranks on as many GPUs")
    failed = 0
    checks = [
        (clean, fit(world)), (rounds, 32), (overflow, 48), (stale, fit(world)), (kept, fit(world)),
    ]
    for check, capacity in checks:
        start = time.monotonic()
        failures = on_ranks(library, world, check, capacity)
        verdict = "FAILED" if failures else "passed"
        print(f"{check.__name__:<10} {verdict} {time.monotonic() - start:6.2f} s  {check.__doc__}",
              flush=True)
        for failure in failures:
            print(failure, flush=True)
        failed += bool(failures)
    verdict = "FAILED" if failed else "ok"
    print(f"test result: {verdict}. {len(checks) - failed} passed; {failed} failed; 0 ignored")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
