/* Which level CPU variants may use (apex_cpu_level): those of the x86-64 psABI, 1 to 4; on aarch64 1, whose baseline
 * has NEON, and 2, SVE. */
#pragma once

namespace apex {

/* What this machine and its operating system can run. Asked once. */
int machine_cpu_level();

/* The level in force: the machine's, unless apex_set_cpu_level lowered it. */
int cpu_level();

}  // namespace apex
