"""Options of the run-time compilers, with the meaning of the packs' (build: `-O3 --fmad=false`,
`-O3 -ffp-contract=off`). Contraction is off so that prebuilt, run-time compiled and PTX code agree bit for
bit."""

from __future__ import annotations

from apex._loader.machine import JitTarget


def options(target: JitTarget) -> tuple[str, ...]:
    """Options for a machine.JitTarget, as a tuple of str."""
    if target.kind == "hsaco":
        return (
            f"--offload-arch={target.arch}",
            "-O3",
            "-std=c++17",
            "-ffp-contract=off",
            "-nogpuinc",
            "-nogpulib",
            f"-mcode-object-version={6 if target.arch.endswith('-generic') else 5}",
        )
    # NVRTC has no -O: it passes ptxas the same level 3 that nvcc -O3 does. It refuses plain host functions,
    # which the shared headers hold beside the kernels; counted as device functions nobody calls, they vanish.
    arch = f"--gpu-architecture={target.arch}"
    return (arch, "--std=c++17", "--fmad=false", "--device-as-default-execution-space")
