// std::exception_ptr counts references through two functions that libstdc++ exports since CXXABI_1.3.13 only.
// Its copy constructor and destructor do the same and have been exported since 1.3.3. The versions are
// spelled out because without them the two names would bind to the inline copies that call us back.
// This file must not include <exception>: it would bring those inline copies.
extern "C" void apex_compat_copy(void* self, const void* other);
extern "C" void apex_compat_destroy(void* self);
__asm__(".symver apex_compat_copy,_ZNSt15__exception_ptr13exception_ptrC1ERKS0_@CXXABI_1.3.3");
__asm__(".symver apex_compat_destroy,_ZNSt15__exception_ptr13exception_ptrD1Ev@CXXABI_1.3.3");

extern "C" void apex_compat_addref(void*) __asm__("_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
extern "C" void apex_compat_release(void*) __asm__("_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");

void apex_compat_addref(void* self) {
  void* copy;  // the copy is never destroyed: its reference is the one asked for
  apex_compat_copy(&copy, self);
}

void apex_compat_release(void* self) { apex_compat_destroy(self); }
