// What g++ 12 takes from a libstdc++ newer than GLIBCXX_3.4.24 or a glibc newer than 2.28, in a copy of our
// own. Linked into every library of a wheel, with a version script that keeps all of it local.
#include <new>
#include <sstream>

// std::shared_ptr asks whether the process has one thread (GLIBC_2.32). "No" is always right.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}

// Out of line in libstdc++ since GLIBCXX_3.4.26.
template std::basic_ostringstream<char>::basic_ostringstream();
template std::basic_stringstream<char>::basic_stringstream();
#if __cplusplus >= 202002L
// GLIBCXX_3.4.29.
template std::string std::basic_stringbuf<char>::str() &&;
template std::string std::basic_stringbuf<char>::str() const&;
#endif

// GLIBCXX_3.4.29. Weak: a compiler that links libstdc++ statically has one already.
namespace std {
__attribute__((weak)) void __throw_bad_array_new_length() { throw std::bad_array_new_length(); }
}  // namespace std
