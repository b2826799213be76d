#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "../../cpu/codec/block_coo.hpp"

// Parts, which travel and are added up: sparse blocks of one tensor in one sync round.
namespace atoll_kernels {

// part: of one rank, for its island. sum: of an island, for all others. Where a tensor has an aggregator, an island's
// sum goes to_aggregator, and what the shared parameters take comes from_aggregator. The numbers are those of frames.
enum class MessageKind { part = 0, sum = 1, to_aggregator = 7, from_aggregator = 8 };

struct Part {
    std::unique_ptr<std::uint32_t[]> index;  // ascending
    std::unique_ptr<float[]> values;         // [count, 16]
    std::size_t count = 0;

    Part() = default;
    explicit Part(std::size_t blocks);
    Units units() const { return {index.get(), values.get(), count}; }
};

struct Payload {
    std::unique_ptr<unsigned char[]> data;
    std::size_t bytes = 0;
};

using SharedPart = std::shared_ptr<const Part>;
using SharedPayload = std::shared_ptr<const Payload>;

SharedPayload copied(const unsigned char* data, std::size_t bytes);

// Memory that one worker uses again and again.
template <typename T>
class ReusableBuffer {
  public:
    T* of(std::size_t count) {
        if (count > size_) {
            data_ = std::make_unique_for_overwrite<T[]>(count);
            size_ = count;
        }
        return data_.get();
    }

  private:
    std::unique_ptr<T[]> data_;
    std::size_t size_ = 0;
};

struct Scratch {
    ReusableBuffer<float> gradient, scores, values, saved;
    ReusableBuffer<std::uint32_t> index;
    ReusableBuffer<unsigned char> bytes;
};

// The way the parts of one tensor are encoded. With random selection no index travels: `seed` of tensor and sync round
// tells them.
struct Format {
    Layout layout;
    std::uint64_t seed;

    std::size_t blocks() const;
};

struct EncodedPart {
    SharedPart part;  // as everyone who reads the payload has it
    SharedPayload payload;
};

// Encodes and decodes `units`; `residual` (may be null) gets what 16 bits take away added.
EncodedPart encode_part(const Format& format, const Units& units, float* residual, Scratch& scratch);

// Reads `count` blocks into `part`; returns null, or what is wrong with the payload.
const char* read(const Format& format, const Payload& payload, std::size_t count, Part& part);

// The sum in the order of the inputs. Beyond float32's range stands its largest number, so that it may travel.
Units sum_of(const std::vector<SharedPart>& inputs, Scratch& scratch);

SharedPart copied(const Units& units);

// to [entries] += units.
void add_to(float* to, std::size_t entries, const Units& units);

// a + factor * b.
Part plus(const Units& a, const Units& b, float factor);

// a - b, which have the same blocks.
Part minus(const Units& a, const Units& b);

}  // namespace atoll_kernels
