"""Wheel variants (PEP 817 and 825): one project whose wheels differ in properties of the machine, not in their name.

variantlib writes the metadata; what it says comes from the ledger of each wheel. A wheel's variant is the same wheel by
the name apex-VERSION-PYTHON-PYTHON-PLATFORM-LABEL.whl with a variant.json in its dist-info; apex-VERSION-variants.json
beside them holds all variants, for an index.
"""

from __future__ import annotations

from pathlib import Path

from build_matrix.errors import BuildError
from build_matrix.parts import ledger
from build_matrix.spec import matrix
from build_matrix.spec.archs import Arch
from build_matrix.store import files
from build_matrix.wheels import wheel
from build_matrix.wheels.wheel_file import WheelFile

PROJECT = "apex"
# Who tells an installer what the machine has; namespaces in the order in which they are asked.
PROVIDERS = {
    "nvidia": ("nvidia-variant-provider>=0.0.1", "nvidia_variant_provider.plugin:NvidiaVariantPlugin"),
    "amd": ("amd-variant-provider>=0.0.1", "amd_variant_provider.plugin:AMDVariantPlugin"),
}


def _library():
    try:
        import variantlib.api
        import variantlib.models.variant_info
        import variantlib.variants_json
    except ImportError:
        raise BuildError("wheel variants want variantlib: pip install 'variantlib>=0.2.2,<0.3'") from None
    return variantlib


def properties(coverage: dict) -> list[str]:
    """What of a machine a wheel was built for, from its ledger: the archs on which every kernel is native. A generic
    arch of AMD has no name among the properties: its chips have packs of their own, or compile at first use."""
    return [text for arch in ledger.native(coverage) if (text := _property(Arch(arch)))]


def _property(arch: Arch) -> str | None:
    if arch.vendor == "rocm":
        return None if arch.generic else f"amd :: gfx_arch :: {arch.name}"
    return f"nvidia :: sm_arch :: {arch.number}_{'virtual' if arch.kind == 'ptx' else 'real'}"


def info():
    """variantlib's VariantInfo of the project: providers, and which is asked first."""
    models = _library().models.variant_info
    providers = {
        namespace: models.ProviderInfo(requires=[package], plugin_api=plugin)
        for namespace, (package, plugin) in PROVIDERS.items()
    }
    return models.VariantInfo(namespace_priorities=list(PROVIDERS), providers=providers)


def description(built: WheelFile):
    """variantlib's VariantDescription of a wheel: labelled cu130 or rocm7.2, and `null` of apex-cpu, which any machine
    takes. Raises BuildError for a wheel for GPUs without a pack: it would be the null variant by another name."""
    api = _library().api
    coverage = built.json("apex/coverage.json")
    found = [api.VariantProperty.from_str(text) for text in properties(coverage)]
    if not found and built.facts["accelerator"] != "cpu":
        raise BuildError(f"{built.path.name} has no pack with a property: it is no variant")
    return api.VariantDescription(found, label=built.facts["local"]) if found else api.VariantDescription([])


def write(wheels: list[Path], target: Path) -> list[Path]:
    """Writes the variants of `wheels` and apex-VERSION-variants.json into `target`. Returns the paths.

    Raises BuildError where wheels of one label have other packs: a label has one meaning.
    """
    library, written, indexed = _library(), [], {}
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(wheels):
        built = WheelFile(path)
        built.check_facts("accelerator", "local", "version")
        if matrix.load().accelerator(built.facts["accelerator"]).pure:
            continue  # Python alone: no property of a machine chooses it, and `null` is apex-cpu's
        described, version = description(built), built.facts["version"]
        text = library.api.make_variant_dist_info(described, info(), expand_aot_plugin_properties=False)
        name = f"{PROJECT}-{version}-{built.tag}-{described.label}.whl"
        own = {n: built.data(n) for n in built.members if ".dist-info/" not in n}
        more = {n.partition("/")[2]: built.data(n) for n in built.members if ".dist-info/sboms/" in n}
        with files.beside(target / name) as partial:
            wheel.write(partial, PROJECT, version, built.tag, own, more | {"variant.json": text.encode()})
            written.append(partial.replace(target / name))
        found = library.variant_dist_info.VariantDistInfo(text)
        if version not in indexed:
            indexed[version] = found
            continue
        try:
            indexed[version].merge(found)
        except library.errors.ValidationError as error:
            raise BuildError(
                f"{path.name}: another wheel {described.label} has other packs: {error}"
            ) from None
    for version, found in indexed.items():
        written.append(target / f"{PROJECT}-{version}-variants.json")
        files.write(written[-1], found.to_str() + "\n")
    return written
