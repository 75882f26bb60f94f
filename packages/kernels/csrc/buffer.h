// Scratch memory that is reused from step to step and only grows.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

class Buffer {
  public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    ~Buffer() { std::free(memory_); }

    // At least `size` bytes on a page boundary, not initialized; what an earlier call gave is no longer valid.
    char* bytes(int64_t size) {
        constexpr int64_t PAGE = 4096;
        if (size > size_) {
            std::free(memory_);
            size_ = 0;
            int64_t pages = (size + PAGE - 1) / PAGE;
            memory_ = static_cast<char*>(std::aligned_alloc(size_t(PAGE), size_t(PAGE * pages)));
            if (!memory_) throw std::bad_alloc();
            size_ = PAGE * pages;
        }
        return memory_;
    }

    float* floats(int64_t count) { return reinterpret_cast<float*>(bytes(4 * count)); }

  private:
    char* memory_ = nullptr;
    int64_t size_ = 0;
};
