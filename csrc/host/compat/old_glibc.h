/* Forced include (`-include`) of every C++ file of a library that must load on glibc 2.28.
 *
 * A build on a newer glibc would bind these names to versions that the older one lacks (dl*: 2.34, when libdl
 * moved into libc; double exp/log/pow: 2.29, when they stopped to set errno through a wrapper). Both glibcs
 * still hold the first versions, so those are asked for by name. Link with `-l:libdl.so.2`: up to 2.33 the
 * dl* functions live there, and it is still there, empty, in newer ones.
 */
#pragma once
#if defined(__linux__) && defined(__GNUC__)
// The first version of glibc on the processor.
#if defined(__x86_64__)
#define APEX_FIRST_GLIBC "GLIBC_2.2.5"
#elif defined(__aarch64__)
#define APEX_FIRST_GLIBC "GLIBC_2.17"
#endif
#if defined(APEX_FIRST_GLIBC)
#define APEX_FIRST(name) __asm__(".symver " #name "," #name "@" APEX_FIRST_GLIBC)
APEX_FIRST(dlopen);
APEX_FIRST(dlsym);
APEX_FIRST(dlclose);
APEX_FIRST(dlerror);
APEX_FIRST(dladdr);
APEX_FIRST(exp);
APEX_FIRST(exp2);
APEX_FIRST(log);
APEX_FIRST(log2);
APEX_FIRST(pow);
#undef APEX_FIRST
#undef APEX_FIRST_GLIBC
#endif
#endif
