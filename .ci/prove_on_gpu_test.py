"""What .ci/prove-on-gpu says of programs, and does with them, where there is no GPU.

    python3 .ci/prove_on_gpu_test.py
"""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import select
import sys
import tempfile
import unittest
from unittest import mock

sys.dont_write_bytecode = True
HERE = os.path.dirname(os.path.abspath(__file__))
LOADER = importlib.machinery.SourceFileLoader("prove", os.path.join(HERE, "prove-on-gpu"))
prove = importlib.util.module_from_spec(importlib.util.spec_from_loader("prove", LOADER))
LOADER.exec_module(prove)

# What a program says that is its own harness, and one of libtest.
OWN = """
running 3 tests
test cuda_threads::modes::eager ... ok
cuda_threads::failure::breaks: skipped: it would break the device for all
test cuda_threads::failure::breaks ... ignored
16 ranks: skipped: groups have at most 8
test cuda_threads::shapes::one_to_sixteen_ranks ... ok

test result: ok. 2 passed; 0 failed; 1 ignored; 1 on fewer ranks; 0 filtered out; finished in 0.10s
"""
LIBTEST = """
running 3 tests
test one ... ok
test lives::two ... two: skipped: no GPU
ok
test three ... 5 ranks: skipped: groups have at most 2
ok

test result: ok. 3 passed; 0 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
"""
NONE = "test result: ok. 0 passed; 0 failed; 0 ignored; 0 measured; 9 filtered out; finished in 0.00s\n"
ALL_SKIPPED = "a::b: skipped: no GPU\ntest result: ok. 0 passed; 0 failed; 1 ignored; 0 filtered out\n"


class Programs(unittest.TestCase):
    """What is made of how a program ends."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.out = folder.name
        silence = contextlib.redirect_stdout(io.StringIO())
        silence.__enter__()
        self.addCleanup(silence.__exit__, None, None, None)
        self.part = prove.Part("tests", self.out, self.out)

    def told(self, log, code=0):
        """The result of a test program that says `log`."""
        script = "import sys; sys.stdout.write(sys.argv[1]); sys.exit(int(sys.argv[2]))"
        self.part.run("program", [sys.executable, "-c", script, log, str(code)], counts=True)
        return self.part.results[-1]

    def test_skipped_checks_are_counted_whatever_the_harness(self):
        own = self.told(OWN)
        self.assertEqual([own[key] for key in prove.COUNTS], [2, 0, 1, 1])
        self.assertEqual(len(own["skips"]), 2)
        libtest = self.told(LIBTEST)
        self.assertEqual([libtest[key] for key in ["passed", "failed", "skipped"]], [2, 0, 1])
        self.assertEqual([own["verdict"], libtest["verdict"]], ["passed"] * 2)

    def test_nothing_that_ran_has_not_passed(self):
        self.assertEqual(self.told(NONE)["verdict"], "failed")
        self.assertEqual(self.told("")["code"], "no check")
        self.assertEqual(self.told(ALL_SKIPPED)["verdict"], "skipped")
        self.assertEqual(self.told("torch_capture: skipped: no torch\n")["verdict"], "skipped")
        self.assertEqual(self.told(ALL_SKIPPED, code=3)["code"], 3)

    def test_a_part_has_passed_if_its_programs_have(self):
        self.assertEqual(self.part.verdict(), "skipped")
        self.part.skip("other", "not gathered")
        self.assertEqual(self.part.verdict(), "skipped")
        self.told(OWN)
        self.assertEqual(self.part.verdict(), "passed in part")
        self.told(OWN, code=1)
        self.assertEqual(self.part.verdict(), "failed")

    def test_logs_are_of_the_last_run_of_a_part(self):
        self.told("it failed", code=1)
        prove.Part("faults", self.out, self.out).run("program", ["false"])
        self.assertEqual(sorted(os.listdir(self.out)), ["faults-program.log", "tests-program.log"])
        self.told(OWN)
        self.assertEqual(os.listdir(self.out), ["faults-program.log"])

    def test_nothing_is_started_once_time_is_up(self):
        self.part.begin -= prove.LONGEST
        path = os.path.join(self.out, "started")
        self.part.run("program", ["touch", path])
        self.assertEqual(self.part.results[-1]["code"], "out of time")
        self.assertFalse(os.path.exists(path))

    def test_nothing_outlives_a_program(self):
        # The reader comes to the end of the pipe once no process holds the other end.
        for end, seconds, code in [("exit 3", 60, 3), ("sleep 600", 0.2, "out of time")]:
            reader, writer = os.pipe()
            os.set_inheritable(writer, True)
            script = f"sleep 600 & {end}"
            with mock.patch.object(prove.subprocess, "Popen", leaving_open(writer)):
                self.assertEqual(prove.execute(["sh", "-c", script], {}, seconds)[0], code)
            os.close(writer)
            self.assertEqual(select.select([reader], [], [], 30)[0], [reader])
            os.close(reader)


def leaving_open(writer):
    """Popen, whose children have `writer` too."""
    popen = prove.subprocess.Popen
    return lambda *arguments, **named: popen(*arguments, **named, pass_fds=[writer])


class Proofs(unittest.TestCase):
    """What goes to proof.json."""

    def proof_of(self, commit, *runs):
        """The parts in proof.json after runs of those parts."""
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
            with mock.patch.object(prove, "commit", lambda: commit), \
                    mock.patch.object(prove, "gpus", lambda: ["a GPU, 1"]):
                for names in runs:
                    proof = prove.Proof(out)
                    for name in names:
                        part = prove.Part(name, out, out)
                        part.run("program", ["true"])
                        proof.add(part)
            with open(os.path.join(out, "proof.json")) as file:
                proof = json.load(file)
            self.assertEqual([r["part"] for r in proof["results"]], [p["part"] for p in proof["parts"]])
            return [part["part"] for part in proof["parts"]]

    def test_parts_of_one_commit_come_together(self):
        self.assertEqual(self.proof_of("12ab", ["a", "b"], ["c", "a"]), ["b", "c", "a"])

    def test_parts_of_unknown_code_do_not(self):
        for commit in ["12ab-dirty", "unknown"]:
            self.assertEqual(self.proof_of(commit, ["a", "b"], ["c", "d"]), ["c", "d"])


class Driver:
    """A CUDA driver that shows GPUs, or fails to start."""

    def __init__(self, names, starts=True):
        self.names, self.starts = names, starts

    def cuInit(self, flags):
        return 0 if self.starts else 100

    def cuDeviceGetCount(self, number):
        number._obj.value = len(self.names)
        return 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal
        return 0

    def cuDeviceGetName(self, name, length, device):
        name.value = self.names[device.value].encode()
        return 0


class Gpus(unittest.TestCase):
    """What counts as a GPU: what the driver shows to programs."""

    def found(self, driver):
        with mock.patch.object(prove.ctypes, "CDLL", driver), \
                mock.patch.object(prove, "driver", lambda: "580"):
            return prove.gpus.__wrapped__()

    def test_gpus_are_those_of_the_driver(self):
        self.assertEqual(self.found(lambda _: Driver(["A", "B"])), ["A, 580", "B, 580"])
        self.assertEqual(self.found(lambda _: Driver([])), [])
        self.assertEqual(self.found(lambda _: Driver(["A"], starts=False)), [])
        self.assertEqual(self.found(mock.Mock(side_effect=OSError)), [])

    def test_the_first_is_the_first_of_those(self):
        for visible, first in [(None, "0"), ("3", "3"), (" 2,0", "2"), ("GPU-12ab,1", "GPU-12ab")]:
            named = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
            with mock.patch.dict(os.environ, named, clear=True):
                self.assertEqual(prove.first_gpu(), {"CUDA_VISIBLE_DEVICES": first})

    def test_without_one_there_is_no_proof(self):
        with tempfile.TemporaryDirectory() as out, contextlib.redirect_stderr(io.StringIO()), \
                mock.patch.object(prove, "gpus", lambda: []), \
                mock.patch.object(sys, "argv", ["prove-on-gpu", out]):
            with self.assertRaises(SystemExit) as ended:
                prove.main()
            self.assertEqual((ended.exception.code, os.listdir(out)), (2, []))


if __name__ == "__main__":
    unittest.main()
