/* Forced include (`-include`) of every C++ file of a library that must load on glibc 2.28.
 *
 * A build on a newer glibc would bind these names to versions that the older one lacks (dl*: 2.34, when libdl
 * moved into libc; double exp/log/pow: 2.29, when they stopped to set errno through a wrapper). Both glibcs
 * still hold the first versions, so those are asked for by name. Link with `-l:libdl.so.2`: up to 2.33 the
 * dl* functions live there, and it is still there, empty, in newer ones.
 */
#pragma once
#if defined(__linux__) && defined(__x86_64__) && defined(__GNUC__)
__asm__(".symver dlopen,dlopen@GLIBC_2.2.5");
__asm__(".symver dlsym,dlsym@GLIBC_2.2.5");
__asm__(".symver dlclose,dlclose@GLIBC_2.2.5");
__asm__(".symver dlerror,dlerror@GLIBC_2.2.5");
__asm__(".symver dladdr,dladdr@GLIBC_2.2.5");
__asm__(".symver exp,exp@GLIBC_2.2.5");
__asm__(".symver exp2,exp2@GLIBC_2.2.5");
__asm__(".symver log,log@GLIBC_2.2.5");
__asm__(".symver log2,log2@GLIBC_2.2.5");
__asm__(".symver pow,pow@GLIBC_2.2.5");
#endif
