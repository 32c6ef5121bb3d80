"""Which tests look at which sources: no source is left to the moving slice alone (build_matrix/check/affected.py)."""

import re

import pytest

from build_matrix import REPOSITORY
from build_matrix.check import affected


@pytest.mark.parametrize(
    "source, test",
    [
        ("apex/reference/xentropy.py", "tests/L0/test_contrib_xentropy.py"),
        ("csrc/host/xentropy_cpu.cpp", "tests/L0/test_contrib_xentropy.py"),
        ("csrc/host/norm_cpu.cpp", "tests/L0/test_layer_norm.py"),
        ("apex/contrib/optimizers/_gradients.py", "tests/L0/parallel/test_distributed_fused_adam.py"),
        ("apex/optimizers/_capturable.py", "tests/L0/test_fused_adam.py"),
        ("apex/_flat.py", "tests/L0/test_combine_tensors.py"),
        ("apex/_loader/jit/rtc.py", "tests/L0/loader/test_jit.py"),
        ("tests/simt/executor.py", "tests/simt/test_rope.py"),
        ("build_matrix/store/store.py", "tests/farm/test_store.py"),  # which imports it from the room
        ("build_matrix/commands/verify.py", "tests/farm/test_signing.py"),
        ("build_matrix/commands/bake.py", "tests/farm/test_commands.py"),  # which imports the command line
        ("build_matrix/commands/options.py", "tests/farm/test_commands.py"),
        ("README.md", "tests/farm/test_documents.py"),
        ("docs/amp.md", "tests/farm/test_documents.py"),
        ("noxfile.py", "tests/farm/test_sessions.py"),
        ("ci/accepted_skips.toml", "tests/farm/test_rings.py"),
        ("tests/L0/test_te_eager.py", "tests/L0/test_defaults.py"),
        ("apex/optimizers/fused_adam.py", "tests/L0/test_defaults.py"),
    ],
)
def test_what_no_test_names_is_looked_at_by_those_that_name_its_users(source, test):
    assert test in affected.tests([source])


def test_every_source_has_tests():
    """Else a change of it would wait for the moving slice."""
    alone = [path for path in affected.everything() if not affected.of_file(path)]
    assert alone == []


def test_who_reads_every_file_of_a_folder_is_known():
    """By the line that does: "for path in (REPOSITORY / folder).rglob("*.py")"."""
    known = {test for tests in affected.READ_ALL.values() for test in tests}
    reads = re.compile(r"(?:APEX|TESTS|ROOT|FOLDER|REPOSITORY / [\w\"]+\))\.rglob\(\"\*\.py\"\)")
    files = [
        path for path in affected.everything() if path.startswith("tests/") and path != affected.EXAMPLES
    ]
    found = {path for path in files if reads.search((REPOSITORY / path).read_text(encoding="utf-8"))}
    assert found == known
