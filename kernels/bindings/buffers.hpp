#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

// Shared by the CPU and the CUDA binding: Python objects in, checked float32 buffers out. Nothing is copied.
// Refusals are Python's TypeError (what an object is) and ValueError (how buffers fit together); the Python wrapper
// turns both into atoll.errors.BadInput.
namespace atoll_kernels {

namespace nb = nanobind;

enum class Access { read, write };

// The entries a buffer may have.
struct EntryType {
    const char* name;
    bool (*fits)(nb::dlpack::dtype dtype);
};

inline constexpr EntryType float32_entries{"float32", [](nb::dlpack::dtype d) { return d == nb::dtype<float>(); }};

struct Buffer {
    float* data;  // float32 unless another entry type was asked for
    std::size_t entries;
    int device_id;
    nb::dlpack::dtype dtype;
    // One of these keeps the memory alive while the GIL is released, even if the caller's list is emptied meanwhile.
    nb::object owner;
    nb::ndarray<nb::ro> read_export;
    nb::ndarray<> write_export;
};

inline std::string class_name(nb::handle object) { return nb::str(object.type().attr("__name__")).c_str(); }

inline std::string dtype_name(nb::dlpack::dtype dtype) {
    using Code = nb::dlpack::dtype_code;
    const std::string bits = std::to_string(dtype.bits);
    switch (static_cast<Code>(dtype.code)) {
        case Code::Int: return "int" + bits;
        case Code::UInt: return "uint" + bits;
        case Code::Float: return "float" + bits;
        case Code::Bfloat: return "bfloat" + bits;
        case Code::Complex: return "complex" + bits;
        case Code::Bool: return "bool";
        default: return "an unknown type of " + bits + " bits";
    }
}

// The C function of the DLPack exchange API (DLPack 1.3) that describes a tensor without exporting it: a tenth of the
// cost of __dlpack__(), which matters for the many small gradients of a model. torch has it since 2.10.
struct ExchangeApi {
    std::uint32_t major, minor;
    ExchangeApi* previous;
    void* allocate;
    void* export_managed;
    void* import_managed;
    int (*describe)(void* object, nb::dlpack::dltensor* out);
    void* current_stream;
};

inline bool describe_fast(nb::handle object, nb::dlpack::dltensor& tensor) {
    static PyObject* const name = PyUnicode_InternFromString("__dlpack_c_exchange_api__");
    const nb::object capsule = nb::steal(PyObject_GetAttr(object.type().ptr(), name));
    const auto* const api = capsule.is_valid()
                                ? static_cast<ExchangeApi*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"))
                                : nullptr;
    const bool described =
        api != nullptr && api->major == 1 && api->describe != nullptr && api->describe(object.ptr(), &tensor) == 0;
    if (!described) PyErr_Clear();  // the ordinary way is tried next and has the last word
    return described;
}

inline void check_tensor(const nb::dlpack::dltensor& tensor, const std::string& name, int device_type,
                         const EntryType& type) {
    if (!type.fits(tensor.dtype)) {
        throw nb::type_error(
            (name + " is " + dtype_name(tensor.dtype) + ", not " + type.name + "; pass a " + type.name + " copy")
                .c_str());
    }
    if (tensor.device.device_type != device_type) {
        const char* const here = device_type == nb::device::cpu::value ? "of the CPU" : "of a CUDA device";
        throw nb::type_error((name + " is not in the memory " + here +
                              "; all buffers of a call must be on one device, so move it there first")
                                 .c_str());
    }
}

inline std::size_t count_dense_entries(const nb::dlpack::dltensor& tensor, const std::string& name) {
    std::int64_t entries = 1;
    bool dense = true;
    for (int axis = tensor.ndim; axis-- > 0;) {
        const std::int64_t length = tensor.shape[axis];
        dense = dense && (length == 1 || tensor.strides == nullptr || tensor.strides[axis] == entries);
        entries *= length;
    }
    if (!dense && entries != 0)
        throw nb::value_error((name + " is not contiguous; pass a contiguous copy or a flat view").c_str());
    return static_cast<std::size_t>(entries);
}

inline Buffer checked_buffer(const nb::dlpack::dltensor& tensor, const std::string& name, int device_type,
                             const EntryType& type) {
    check_tensor(tensor, name, device_type, type);
    auto* const data = reinterpret_cast<float*>(static_cast<char*>(tensor.data) + tensor.byte_offset);
    return {data, count_dense_entries(tensor, name), tensor.device.device_id, tensor.dtype, {}, {}, {}};
}

template <typename Array>
Buffer from_export(const Array& array, const std::string& name, int device_type, const EntryType& type) {
    nb::dlpack::dltensor tensor;
    tensor.data = const_cast<void*>(static_cast<const void*>(array.data()));
    tensor.device = {array.device_type(), array.device_id()};
    tensor.ndim = static_cast<std::int32_t>(array.ndim());
    tensor.dtype = array.dtype();
    tensor.shape = const_cast<std::int64_t*>(array.shape_ptr());
    tensor.strides = const_cast<std::int64_t*>(array.stride_ptr());
    return checked_buffer(tensor, name, device_type, type);
}

inline Buffer load_buffer(nb::handle object, const std::string& name, int device_type, Access access,
                          const EntryType& type = float32_entries) {
    nb::dlpack::dltensor tensor;
    if (describe_fast(object, tensor)) {
        Buffer buffer = checked_buffer(tensor, name, device_type, type);
        buffer.owner = nb::borrow(object);
        return buffer;
    }
    nb::ndarray<> writable;
    if (access == Access::write && nb::try_cast(object, writable, false)) {
        Buffer buffer = from_export(writable, name, device_type, type);
        buffer.write_export = std::move(writable);
        return buffer;
    }
    nb::ndarray<nb::ro> readable;
    if (!nb::try_cast(object, readable, false)) {
        throw nb::type_error((name + " is a " + class_name(object) +
                              " that shares no memory through DLPack or the buffer protocol; pass a dense " +
                              type.name + " torch tensor or NumPy array")
                                 .c_str());
    }
    if (access == Access::write)
        throw nb::value_error((name + " is read-only; pass a buffer that may be written").c_str());
    Buffer buffer = from_export(readable, name, device_type, type);
    buffer.read_export = std::move(readable);
    return buffer;
}

}  // namespace atoll_kernels
