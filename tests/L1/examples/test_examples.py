"""The examples run as they are, for an epoch or a few; what they print and write is what their READMEs say."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
NEEDED = ("sklearn", "matplotlib", "rich", "PIL")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"the examples need {', '.join(MISSING)}")


def run(folder, script, *arguments, ranks=1, launcher=("apex.parallel.multiproc",), paths=()):
    """What it prints. Runs in `folder`, where it also finds nothing of the checkout; modules of `paths` come first."""
    done = start(folder, script, *arguments, ranks=ranks, launcher=launcher, paths=paths)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start(folder, script, *arguments, ranks=1, launcher=(), paths=()):
    """The same, as a process that has ended."""
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, arguments)]
    if ranks > 1:
        command[1:1] = ["-m", *launcher]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK")}
    environment.update(
        PYTHONPATH=os.pathsep.join(map(str, [*paths, ROOT])),
        WORLD_SIZE=str(ranks),
        OMP_NUM_THREADS="1",
        COLUMNS="200",
    )
    environment["PYTHONUTF8"] = "1"  # progress bars are no ASCII, whatever the locale of the tests
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=300
    )


def assert_pictures(*paths):
    from PIL import Image

    for path in paths:
        with Image.open(path) as image:
            assert image.format == "PNG" and len(image.convert("L").getcolors(256)) > 1


def figures(text, pattern):
    return [float(number) for number in re.findall(pattern, text)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_simple_distributed(tmp_path, ranks):
    script = "simple/distributed/distributed_data_parallel.py"
    printed = run(tmp_path, script, "--epochs", 5, "--opt-level", "O1" if ranks == 1 else "O5", ranks=ranks)
    assert f"{ranks} process(es)" in printed
    assert figures(printed, r"test accuracy (\S+)")[0] > 0.85
    assert_pictures(tmp_path / "out/loss.png")


def test_imagenet_on_digits(tmp_path):
    """Two processes that share their batch norms; a checkpoint that one process goes on from."""
    printed = run(
        tmp_path,
        "imagenet/main_amp.py",
        "--epochs",
        2,
        "--opt-level",
        "O4",
        "--sync_bn",
        "--deterministic",
        ranks=2,
    )
    losses = figures(printed, r"epoch \d: loss (\S+)")
    assert len(losses) == 2 and losses[1] < losses[0]
    assert_pictures(tmp_path / "out/curve.png")
    checkpoint = tmp_path / "out/checkpoint.pth.tar"
    saved = torch.load(checkpoint)
    assert saved["epoch"] == 2 and not any(name.startswith("module.") for name in saved["state_dict"])
    assert (tmp_path / "out/model_best.pth.tar").exists()

    first = saved["history"][-1][2]
    evaluated = run(
        tmp_path, "imagenet/main_amp.py", "--evaluate", "--resume", checkpoint, "--opt-level", "O4"
    )
    assert figures(evaluated, r"top-1 (\S+) %")[0] == pytest.approx(first, abs=0.5)
    printed = run(
        tmp_path, "imagenet/main_amp.py", "--epochs", 3, "--resume", checkpoint, "--opt-level", "O4"
    )
    assert re.findall(r"epoch (\d): loss", printed) == ["3"]
    assert figures(printed, r"epoch 3: loss (\S+)")[0] < losses[0]
    history = torch.load(checkpoint)["history"]
    assert [epoch for epoch, *_ in history] == [1, 2, 3] and history[:2] == saved["history"]


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    """train/ and val/ with two classes of pictures of different sizes: the digits 0 and 1."""
    from PIL import Image
    from sklearn.datasets import load_digits

    folder, data = tmp_path_factory.mktemp("images"), load_digits()
    for label in (0, 1):
        for number, image in enumerate(data.images[data.target == label][:40]):
            place = folder / ("train" if number < 32 else "val") / f"digit{label}"
            place.mkdir(parents=True, exist_ok=True)
            picture = Image.fromarray((image * (255 / 16)).astype("uint8"))
            picture.resize((20, 20 + number % 4)).save(place / f"{number}.png")
    return folder


def test_imagenet_on_a_folder(tmp_path, image_folder):
    options = (
        "-a",
        "small",
        "--image-size",
        16,
        "-b",
        8,
        "--workers",
        1,
        "--opt-level",
        "O2",
        "--loss-scale",
        128,
    )
    options += ("--keep-batchnorm-fp32", "True", "--channels-last")
    printed = run(tmp_path, "imagenet/main_amp.py", image_folder, *options, "--epochs", 1)
    assert figures(printed, r"top-5 (\S+) %")[0] == 100  # of two classes
    printed = run(tmp_path, "imagenet/main_amp.py", image_folder, *options, "--prof", 2)
    assert "convolution" in printed
    assert json.loads((tmp_path / "out/trace.json").read_text())["traceEvents"]


def test_dcgan(tmp_path, image_folder):
    """On the digits; and on a folder, going on from networks that were saved."""
    printed = run(tmp_path, "dcgan/main_amp.py", "--niter", 1, "--imageSize", 8)
    assert "1 epochs on 1797 images" in printed
    assert_pictures(
        *(tmp_path / "out" / f"{n}.png" for n in ("real_samples", "amp_fake_samples_epoch_000", "losses"))
    )

    folder = ("--dataset", "folder", "--dataroot", image_folder, "--imageSize", 8, "--batchSize", 16)
    run(tmp_path, "dcgan/main_amp.py", *folder, "--niter", 1, "--outf", "folder", "--opt_level", "O2")
    again = ("--netG", "folder/netG.pth", "--netD", "folder/netD.pth", "--opt_level", "O5", "--outf", "again")
    printed = run(tmp_path, "dcgan/main_amp.py", *folder, *again, "--niter", 2)
    assert "2 epochs on 80 images" in printed
    assert_pictures(*(tmp_path / "again" / f"{n}.png" for n in ("losses", "amp_fake_samples_epoch_001")))


GPT = "gpt/train.py"
TORCHRUN = ("torch.distributed.run", "--standalone", "--nproc-per-node=2")
SMALL_GPT = (
    *("--hidden", 16, "--context", 16, "--batch", 8, "--micro-batch", 2, "--steps", 6),
    "--dtype",
    "float32",
)


def gpt_losses(folder):
    return json.loads((folder / "step-000006/progress.json").read_text())["losses"]


def test_gpt(tmp_path):
    """Trained at tensor size 2, gone on from its middle as a pipeline with virtual stages and in one process: the same
    losses as without an interruption, to 1e-5."""
    split = "--tensor", 2, "--sequence-parallel", "--recompute"
    printed = run(
        tmp_path, GPT, *SMALL_GPT, *split, "--save-every", 3, "--out", "whole", ranks=2, launcher=TORCHRUN
    )
    wanted = gpt_losses(tmp_path / "whole")
    assert len(wanted) == 6 and abs(wanted[0] - math.log(128)) < 0.1 and wanted[-1] < wanted[0] - 0.02
    assert figures(printed, r"final loss (\S+),")[0] == pytest.approx(wanted[-1], abs=1e-4)
    assert re.search(r"[\d,]+ tokens per second", printed)
    assert_pictures(tmp_path / "whole/loss.png")
    middle = "--resume", "whole/step-000003"
    split = "--pipeline", 2, "--virtual-pipeline", 2
    run(tmp_path, GPT, *SMALL_GPT, *split, *middle, "--out", "pipeline", ranks=2, launcher=TORCHRUN)
    run(tmp_path, GPT, *SMALL_GPT, *middle, "--out", "one")
    for folder in ("pipeline", "one"):
        assert gpt_losses(tmp_path / folder) == pytest.approx(wanted, rel=1e-5)
    done = start(tmp_path, GPT, *SMALL_GPT, "--layers", 2, *middle)
    assert done.returncode == 1 and "it holds a model of" in done.stderr
    done = start(tmp_path, GPT, *SMALL_GPT, "--resume", "whole")
    assert done.returncode == 1 and "no whole checkpoint" in done.stderr
    done = start(tmp_path, GPT, *SMALL_GPT, "--resume", "whole/step-000006")
    assert done.returncode == 1 and "it is of step 6, and --steps 6 is no more" in done.stderr


def test_gpt_that_cannot_write_its_checkpoint(tmp_path):
    """As on a full disk: every rank says so, in words, and the checkpoint before serves."""
    run(tmp_path, GPT, *SMALL_GPT, "--save-every", 3, "--out", "out")
    more = *SMALL_GPT[:-4], "--steps", 8, *SMALL_GPT[-2:], "--out", "out", "--resume", "out/step-000006"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, (50_000, limits[1])
    )  # bytes of a file: of processes started here, too
    try:
        done = start(tmp_path, GPT, *more, "--tensor", 2, ranks=2, launcher=TORCHRUN)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert done.returncode == 1
    assert done.stderr.count("out/step-000008: the checkpoint could not be written: rank ") == 2, done.stderr
    assert "[rank0]: Traceback" not in done.stderr, done.stderr
    run(tmp_path, GPT, *more)
    for part in (tmp_path / "out/step-000003").glob("*.distcp"):
        os.truncate(part, 1000)
    done = start(tmp_path, GPT, *more[:-1], "out/step-000003")
    assert done.returncode == 1 and "out/step-000003: it cannot be read: rank 0: " in done.stderr, done.stderr
    assert (tmp_path / "out/step-000008/progress.json").is_file()


def test_gpt_with_flags_that_do_not_fit(tmp_path):
    """Every rank says what it is, before any waits."""
    bad = ("--tensor", 3, "--virtual-pipeline", 2, "--batch", 6)
    done = start(tmp_path, GPT, *bad, ranks=2, launcher=TORCHRUN)
    assert done.returncode == 1
    for told in (
        "the number of ranks, 2, is not divisible",
        "--heads, 4,",
        "--batch, 6,",
        "needs --pipeline",
    ):
        assert done.stderr.count(told) == 2, done.stderr


def test_gpt_whose_files_do_not_fit(tmp_path):
    """Said before anything is trained."""
    (tmp_path / "short").write_text("a" * 3000)
    (tmp_path / "strange").write_bytes(b"\xff" * 9000)
    for flags, told in (
        (("--text", "short"), "of 3000 letters 0 are for training and 3000 held out"),
        (("--text", "strange"), "it cannot be read as UTF-8"),
        (("--out", "short"), "--out short: "),
        (("--lr", "nan"), "--lr must be a number from 0 on, not nan"),
        (("--seed", 10**20), "--seed must be between"),
        (("--save-every", -1), "--save-every must not be negative"),
    ):
        done = start(tmp_path, GPT, *SMALL_GPT, *flags)
        assert done.returncode in (1, 2) and told in done.stderr and "Traceback" not in done.stderr, (
            done.stderr
        )


def test_what_examples_write_without_being_asked_where_is_no_part_of_the_checkout():
    """git ignores the folder, in the root and beside each script, and the tests above look for everything in it."""
    for place in ("out", *(f"{path.parent.relative_to(ROOT)}/out" for path in ROOT.glob("examples/**/*.py"))):
        ignored = subprocess.run(["git", "check-ignore", "--quiet", f"{place}/x.png"], cwd=ROOT).returncode
        if ignored == 128:
            pytest.skip("this is no checkout of git")
        assert ignored == 0, place


@pytest.mark.parametrize("recipe", ["delayed", "current", "blocks"])
def test_fp8_digits(tmp_path, recipe):
    """FP8 trains as bfloat16 does."""
    flags = ("--epochs", 4, "--recipe", recipe, "--use-fp8-infer", "--device", "cpu")
    printed = run(tmp_path, "fp8_digits/train.py", *flags)
    assert "products: emulated" in printed
    names = ("bf16", "fp8", "bf16, then fp8")
    (wide,), (narrow,), (after,) = (figures(printed, rf"test accuracy, {name}: (\S+)") for name in names)
    assert wide > 0.85 and min(narrow, after) > wide - 0.05


def test_fp8_gpt(tmp_path):
    """The held-out loss in FP8 is bfloat16's, nearly, for each seed; the curves are drawn."""
    flags = ("--seeds", 2, "--steps", 30, "--hidden", 32, "--context", 32, "--batch", 8, "--device", "cpu")
    printed = run(tmp_path, "fp8_gpt/train.py", *flags, "--plot", "curves.png")
    assert "products: emulated" in printed
    differences = figures(printed, r"held-out loss (\S+) % of bf16's, mean of 2 seeds")
    assert len(differences) == 2 and all(abs(percent) < 5 for percent in differences)
    assert_pictures(tmp_path / "curves.png")


@pytest.mark.parametrize("flags", [(), ("--use-te", "--use-amp"), ("--ln-mlp", "--use-fp8")], ids=str)
def test_sort(tmp_path, flags):
    """Two digits in rows of 4 are sorted after little training, whatever layers the model is of."""
    small = ("--digits", 2, "--length", 4, "--layers", 1, "--width", 32, "--miters", 200, "--lr", 5e-3)
    printed = run(tmp_path, "sort/train.py", *small, "--device", "cpu", *flags)
    (sorted_rows,) = figures(printed, r"(\S+) % of unseen rows sorted")
    assert sorted_rows > 60
    assert ("Transformer Engine's layers" in printed) == bool(flags)


def test_jax_text(tmp_path):
    """An encoder that reads text learns in FP8 without torch."""
    pytest.importorskip("jax", reason="jax is not installed: pip install jax flax")
    (tmp_path / "torch.py").write_text("raise ImportError('this environment has no torch')")
    printed = run(tmp_path, "jax_text/train.py", "--epochs", 2, "--use-fp8", paths=[tmp_path])
    (accuracy,) = figures(printed, r"held out (\S+)")
    assert accuracy > 0.5  # of four kinds


def test_jax_digits(tmp_path):
    """JAX learns in FP8 what it learns in bfloat16, and no torch is needed for it."""
    pytest.importorskip("jax", reason="jax is not installed: pip install jax flax")
    (tmp_path / "torch.py").write_text("raise ImportError('this environment has no torch')")
    printed = run(tmp_path, "jax_digits/train.py", "--epochs", 3, "--layers", 1, paths=[tmp_path])
    losses = figures(printed, r"loss (\S+),")
    assert len(losses) == 2 and losses[1] == pytest.approx(losses[0], rel=0.1)
    assert all(accuracy > 0.6 for accuracy in figures(printed, r"test accuracy (\S+),"))
    assert_pictures(tmp_path / "losses.png")


def test_sparsity(tmp_path):
    """Training on brings the accuracy back, and half of the weights stay zero."""
    printed = run(tmp_path, "sparsity/train.py", "--epochs", 8, "--device", "cpu")
    dense, plain, reordered, trained = figures(printed, r"accuracy (\d\S+)\b")
    assert dense > 0.93 and trained > dense - 0.03 and "still sparse: True" in printed
    assert min(plain, reordered) > 0.5
    kept = figures(printed, r"magnitude kept (\S+)")
    assert kept[1] > kept[0]


def test_blocks_that_are_sparse(tmp_path):
    """Pruning takes a part of what a block gives, and training on brings some of it back."""
    printed = run(tmp_path, "sparsity/blocks.py", "--steps", 3, "--batch", 2, "--device", "cpu")
    found = re.findall(r"off by (\S+) after pruning, (\S+) after training on", printed)
    assert len(found) == 2
    assert all(0 < float(trained) < float(pruned) < 0.5 for pruned, trained in found)
