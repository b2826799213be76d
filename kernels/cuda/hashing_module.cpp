#include "hashing_module.hpp"

#include <nanobind/stl/vector.h>

#include "../bindings/gil.hpp"
#include "../bindings/hash_calls.hpp"
#include "device_type.hpp"
#include "hashing.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

Queue queue_of(const Loaded& buffer, std::uintptr_t stream) { return {buffer.device_id, stream_of(stream)}; }

nb::tuple hash_units(nb::handle unit, const std::vector<std::uint32_t>& seeds, std::size_t partitions,
                     nb::handle order, std::size_t slots, std::uintptr_t stream) {
    const HashCall call(cuda, unit, seeds, partitions, order, slots);
    Partitioned result;
    {
        const GilReleased released(always);
        result = hierarchical_hash_cuda(call.unit.as<std::uint32_t>(), call.unit.entries, call.seeds, call.partitions,
                                        call.slots, call.order.as<std::uint32_t>(), queue_of(call.unit, stream));
    }
    return nb::make_tuple(result.bounds, result.serial);
}

void encode_bitmap(nb::handle member, nb::handle unit, nb::handle bitmap, std::uintptr_t stream) {
    const BitmapCall call(cuda, member, unit, bitmap, Access::read);
    bool all = false;
    {
        const GilReleased released(always);
        all = bitmap_encode_cuda(call.member.as<std::uint32_t>(), call.member.entries, call.unit.as<std::uint32_t>(),
                                 call.unit.entries, call.bitmap.as<std::uint8_t>(), queue_of(call.member, stream));
    }
    if (!all) refuse_units();
}

void decode_bitmap(nb::handle member, nb::handle bitmap, nb::handle unit, std::uintptr_t stream) {
    const BitmapCall call(cuda, member, unit, bitmap, Access::write);
    bool all = false;
    {
        const GilReleased released(always);
        all = bitmap_decode_cuda(call.member.as<std::uint32_t>(), call.member.entries, call.bitmap.as<std::uint8_t>(),
                                 call.unit.as<std::uint32_t>(), call.unit.entries, queue_of(call.member, stream));
    }
    if (!all) refuse_bitmap(call.unit.entries);
}

}  // namespace

void bind_hashing_cuda(nb::module_& m) {
    m.def("hierarchical_hash", hash_units, "unit"_a.none(), "seeds"_a, "partitions"_a, "order"_a.none(), "slots"_a,
          "stream"_a);
    m.def("bitmap_encode", encode_bitmap, "member"_a.none(), "unit"_a.none(), "bitmap"_a.none(), "stream"_a);
    m.def("bitmap_decode", decode_bitmap, "member"_a.none(), "bitmap"_a.none(), "unit"_a.none(), "stream"_a);
}

}  // namespace atoll_kernels
