"""Source installs, spelled as in public apex:

    pip install . --no-build-isolation                                    kernels are compiled at first use
    APEX_BUILD_CPP_OPS=1 APEX_BUILD_CUDA_OPS=1 pip install . --no-build-isolation
    APEX_BUILD_AMP_C=1 pip install . --no-build-isolation                 packs for one extension
    pip install . --no-build-isolation --config-settings "--build-option=--cpp_ext"

TORCH_CUDA_ARCH_LIST and PYTORCH_ROCM_ARCH narrow the archs; BUILD_VERSION replaces the version.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.build_py import build_py

if sys.platform == "win32":
    sys.exit(
        "apex: this source tree is built on Linux, for Windows too (docs/windows.md). Where a wheel serves: "
        "python -m pip install apex-cuda, or apex-cpu"
    )
ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))  # PEP 517 front ends run this file without its folder on the path

from build_matrix.errors import BuildError  # noqa: E402
from build_matrix.parts import tree  # noqa: E402
from build_matrix.spec.registry import Registry  # noqa: E402
from build_matrix.wheels import source_install  # noqa: E402

REGISTRY = Registry.load()
try:
    ASKED = REGISTRY.asked(os.environ, source_install.take_options(sys.argv, REGISTRY))
except BuildError as error:
    sys.exit(f"apex: {error}")


class BuildApex(build_py):
    """Python sources, then everything that is compiled."""

    def run(self):
        if not self.editable_mode:
            # setuptools never empties its build folder; packs of an earlier build would be installed again.
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        # An editable install imports the checkout, whose built parts lie under build/tree.
        target = tree.DEFAULT if self.editable_mode else Path(self.build_lib)
        try:
            source_install.build(ASKED, target)
        except BuildError as error:
            sys.exit(f"apex: {error}")


class NativeDistribution(Distribution):
    """Holds compiled libraries, though none is built by setuptools: the wheel is tagged for this platform."""

    def has_ext_modules(self):
        return True


setup(
    name="apex",
    version=source_install.version(),
    description="Fused optimizers, normalization, softmax and amp tools for PyTorch",
    license="BSD-3-Clause",
    python_requires=">=3.10",
    install_requires=["torch>=2.8"],
    packages=find_packages(include=["apex", "apex.*"]),
    package_data={"apex": ["py.typed"], "apex._legacy": ["*.txt"]},
    cmdclass={"build_py": BuildApex},
    distclass=NativeDistribution,
)
