// Exceptions must not cross the C interface: exported functions return a status, and `message` returns the text of the
// calling thread's last error.
#pragma once

#include <cstdint>
#include <cstdio>
#include <exception>
#include <new>
#include <stdexcept>

// Mirrored in native/abi.py.
enum Status : int64_t { DONE = 0, REFUSED = 1, NO_MEMORY = 2, FAILED = 3 };

constexpr int64_t MESSAGE_BYTES = 256;

inline char* message() noexcept {
    static thread_local char text[MESSAGE_BYTES];
    return text;
}

inline Status ended(Status status, const char* why) noexcept {
    std::snprintf(message(), MESSAGE_BYTES, "%s", why);
    return status;
}

// Calls body(), in whose parallel loops it may be any thread that throws (see pool.cpp).
template <class Body>
Status guarded(const Body& body) noexcept {
    try {
        body();
        return DONE;
    } catch (const std::invalid_argument& error) {
        return ended(REFUSED, error.what());
    } catch (const std::bad_alloc&) {
        return ended(NO_MEMORY, "native kernels found no memory");
    } catch (const std::exception& error) {
        return ended(FAILED, error.what());
    } catch (...) {
        return ended(FAILED, "native kernels failed");
    }
}

// Throws if there is a fault.
inline void refuse(const char* fault) {
    if (fault) throw std::invalid_argument(fault);
}
