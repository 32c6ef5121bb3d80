/* Which level CPU variants may use (apex_cpu_level): those of the x86-64 psABI, 1 to 4; on aarch64 1, whose baseline
 * has NEON, and 2, SVE. */
#pragma once

namespace apex {

/* What this machine and its operating system can run. Asked once. */
int machine_cpu_level();

/* Whether it has AVX512_BF16, which is of no level. Ask where the level is 4. */
bool machine_has_bfloat16();

/* The level in force: the machine's, unless apex_set_cpu_level lowered it. */
int cpu_level();

}  // namespace apex
