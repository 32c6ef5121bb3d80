"""The registry: what a source build may be asked, and what is refused by name."""

import pytest

from build_matrix.errors import BuildError, NotInThisBuild, UnknownVariable
from build_matrix.spec.registry import Registry, device_units, schemas

REGISTRY = Registry.load()


def names(extensions):
    return {extension.name for extension in extensions}


def test_every_op_has_a_schema_and_every_schema_an_op():
    found = schemas().values()
    assert {schema.unit for schema in found} == set(REGISTRY.ops())


def test_every_device_op_has_a_source():
    assert set(REGISTRY.device_ops()) <= {path.stem for path in device_units()}


def test_a_group_variable_asks_for_the_whole_group():
    asked = names(REGISTRY.asked({"APEX_BUILD_CUDA_OPS": "1"}))
    assert asked == {e.name for e in REGISTRY.extensions if e.group == "cuda"}
    assert names(REGISTRY.asked({"APEX_BUILD_CPU_OPS": "1"})) == names(
        REGISTRY.asked({"APEX_BUILD_CPP_OPS": "1"})
    )


@pytest.mark.parametrize(
    "environment",
    [
        {"APEX_BUILD_AMP_C": "1"},
        {"APEX_BUILD_AMP_C": "yes", "APEX_BUILD_XENTROPY": "0", "PATH": "/bin"},
    ],
)
def test_one_variable_asks_for_one_extension(environment):
    assert names(REGISTRY.asked(environment)) == {"amp_C"}


def test_options_and_variables_of_the_other_tree():
    by_option = names(REGISTRY.asked({}, ["--cuda_ext"]))
    assert "amp_C" in by_option and "apex_C" not in by_option
    assert names(REGISTRY.asked({"APEX_CUDA_EXT": "1"})) == by_option
    assert names(REGISTRY.asked({}, ["--cpp_ext"])) == {"apex_C"}


def test_nothing_asked_is_nothing():
    assert REGISTRY.asked({"HOME": "/", "APEX_VARIANT": "cpu", "APEX_STRICT": "1"}) == []


def test_an_unknown_variable_is_named_with_its_neighbour():
    with pytest.raises(UnknownVariable, match="APEX_BUILD_AMP_D.*APEX_BUILD_AMP_C"):
        REGISTRY.asked({"APEX_BUILD_AMP_D": "1"})
    with pytest.raises(UnknownVariable, match="--cpp_exd"):
        REGISTRY.asked({}, ["--cpp_exd"])


LINE = '[[extension]]\nname = "{0}"\nvariable = "APEX_BUILD_{0}"\noption = "{0}"\nops = []\nminimum_torch = "2.8"\n'


@pytest.fixture
def with_planned(tmp_path):
    """A registry with an extension that is not in the build."""
    rest = 'group = "cuda"\nstate = "{}"\n'
    text = LINE.format("A") + rest.format("complete")
    text += LINE.format("LATER") + rest.format("planned") + 'successor = "torch.later"\n'
    (tmp_path / "extensions.toml").write_text(text)
    return Registry.load(tmp_path / "extensions.toml")


@pytest.mark.parametrize("variable", ["APEX_BUILD_LATER", "APEX_LATER"])
def test_what_is_not_in_this_build_is_named(with_planned, variable):
    with pytest.raises(
        NotInThisBuild, match=f"{variable} asks for what is not in this build.*use torch.*Leave"
    ):
        with_planned.asked({variable: "1", "APEX_BUILD_A": "1"})
    with pytest.raises(NotInThisBuild, match="--LATER asks"):
        with_planned.asked({}, ["--LATER"])
    assert names(with_planned.asked({variable: "0"})) == set()
    assert "LATER" in names(with_planned.asked({"APEX_BUILD_CUDA_OPS": "1"}))  # a group goes on without it


def test_bad_lines_are_refused(tmp_path):
    line = LINE.format("A")
    file = tmp_path / "extensions.toml"
    for rest, words in [
        ('group = "gpu"\nstate = "planned"\n', "group 'gpu'"),
        ('group = "cpp"\nstate = "done"\n', "state 'done'"),
        ('group = "cpp"\nstate = "planned"\ncolour = 1\n', "colour"),
    ]:
        file.write_text(line + rest)
        with pytest.raises(BuildError, match=words):
            Registry.load(file)
    file.write_text(2 * (line + 'group = "cpp"\nstate = "planned"\n'))
    with pytest.raises(BuildError, match="twice"):
        Registry.load(file)
