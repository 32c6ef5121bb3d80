/* Which x86-64 level CPU variants may use (apex_cpu_level). */
#pragma once

namespace apex {

/* What this machine and its operating system can run: 1, 2, 3 or 4. Asked once. */
int machine_cpu_level();

/* The level in force: the machine's, unless apex_set_cpu_level lowered it. */
int cpu_level();

}  // namespace apex
