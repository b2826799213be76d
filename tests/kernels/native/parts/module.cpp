// Bindings of parts that the exchange engine and the hashing contain, for tests and benchmarks alone.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "../../../../kernels/bindings/gil.hpp"
#include "../../../../kernels/bindings/sparse_calls.hpp"
#include "../../../../kernels/cpu/bindings/call_options.hpp"
#include "../../../../kernels/cpu/codec/block_coo.hpp"
#include "../../../../kernels/cpu/hashing/murmur3.hpp"
#include "../../../../kernels/cpu/optimizer/sparse_optimizer.hpp"
#include "../../../../kernels/cpu/processor/thread_pool.hpp"
#include "../../../../kernels/cpu/select/compress.hpp"
#include "../../../../kernels/cpu/select/difference.hpp"

namespace atoll_kernels {
namespace {

using namespace nb::literals;

// The buffer that random_blocks fills.
Loaded checked_room(nb::handle index_object, std::size_t blocks) {
    Loaded index = required(index_object, "index", Access::write, index_entries);
    if (blocks > std::size_t{1} << 32) refuse("blocks = " + number(blocks) + " is beyond indices of 32 bits");
    if (index.entries > blocks) {
        refuse("index has room for " + number(index.entries) + " but there are only " + number(blocks) +
               " blocks; pass a shorter one");
    }
    return index;
}

[[noreturn]] void refuse_indices(const Loaded& index, std::size_t end) {
    refuse(index.name + " does not ascend, or reaches beyond the last of " + number(end) +
           "; pass what a selection, decode or sum_units wrote");
}

// The arguments of update_blocks; only the indices are left to be checked.
struct UpdateCall {
    Loaded shared_param, first, second, last_step, live, index, values;
    Hyperparameters hyper;

    UpdateCall(int device_type, nb::handle shared_param_object, nb::handle first_object, nb::handle second_object,
               nb::handle last_step_object, nb::handle live_object, nb::handle index_object, nb::handle values_object,
               const std::string& rule_name, std::int32_t step, double lr, double weight_decay,
               double momentum_or_beta1, double beta2, double epsilon, double scale)
        : shared_param(required(shared_param_object, "shared_param", Access::write, float32_entries, device_type)),
          first(first_object, rule_name.starts_with("adam") ? "first_moment" : "momentum_buffer", Access::write,
                float32_entries, device_type),
          second(second_object, "second_moment", Access::write, float32_entries, device_type),
          last_step(last_step_object, "last_step", Access::write, step_entries, device_type),
          live(live_object, "live", Access::write, live_entries, device_type),
          index(required(index_object, "index", Access::read, index_entries, device_type)),
          values(required(values_object, "values", Access::read, float32_entries, device_type)),
          hyper(checked_hyperparameters(rule_name, step, lr, weight_decay, momentum_or_beta1, beta2, epsilon, scale)) {
        const char* const long_as_shared_param = "it must be as long as shared_param";
        check_entries(first, shared_param.entries, long_as_shared_param);
        check_entries(second, shared_param.entries, long_as_shared_param);
        check_entries(live, shared_param.entries, long_as_shared_param);
        check_entries(last_step, block_count(shared_param.entries),
                      "it must have one entry for each block of shared_param");
        check_entries(values, index.entries * block_entries, "it must hold 16 values for every index");
        if ((hyper.rule == Rule::nesterov && !first.given()) ||
            (is_adaptive(hyper.rule) && !(first.given() && second.given())))
            refuse("rule '" + rule_name + "' needs its moments; pass buffers of zeros, as long as shared_param");
        check_apart({&shared_param, &first, &second, &last_step, &live, &index, &values});
    }

    Parameters parameters() const {
        return {shared_param.data, first.data, second.data, last_step.as<std::int32_t>(), live_of(live),
                shared_param.entries};
    }
    Units update() const { return {index.as<std::uint32_t>(), values.data, index.entries}; }

  private:
    static bool is_adaptive(Rule rule) { return rule == Rule::adam || rule == Rule::adamw; }

    static Hyperparameters checked_hyperparameters(const std::string& rule_name, std::int32_t step, double lr,
                                                   double weight_decay, double momentum_or_beta1, double beta2,
                                                   double epsilon, double scale) {
        const Rule rule = format_named<Rule>(
            rule_name, "rule",
            {{"sgd", Rule::sgd}, {"nesterov", Rule::nesterov}, {"adam", Rule::adam}, {"adamw", Rule::adamw}});
        const double infinity = std::numeric_limits<double>::infinity();
        if (step < 1) refuse("step = " + std::to_string(step) + " is not a step; the first is 1");
        return {rule,
                checked_hyperparameter(lr, "lr", infinity),
                checked_hyperparameter(weight_decay, "weight_decay", infinity),
                checked_hyperparameter(momentum_or_beta1, is_adaptive(rule) ? "beta1" : "momentum", 1),
                checked_hyperparameter(beta2, "beta2", 1),
                checked_hyperparameter(epsilon, "epsilon", infinity),
                checked_hyperparameter(scale, "scale", infinity),
                step};
    }
};

nb::tuple select_difference(nb::handle shared_param_object, nb::handle live_object, double scale, double threshold,
                            nb::handle index_object, nb::handle values_object, int threads, bool portable) {
    const int checked = checked_threads(threads);
    const float narrow = checked_rule(threshold);
    const Loaded shared_param = required(shared_param_object, "shared_param", Access::read);
    const Loaded live = required(live_object, "live", Access::read, live_entries);
    const Loaded index = required(index_object, "index", Access::write, index_entries);
    const Loaded values = required(values_object, "values", Access::write);
    check_entries(live, shared_param.entries, "it must be as long as shared_param");
    check_entries(values, index.entries * block_entries, "it must hold the values of every index there is room for");
    refuse_overlap({&shared_param, &live, &index, &values});
    const Difference of{shared_param.data, live.data, live_of(live).format, checked_weight(scale),
                        shared_param.entries};
    Selection selection;
    {
        const GilReleased released(of.n);
        selection = difference_block(of, narrow, {index.as<std::uint32_t>(), values.data, index.entries}, checked,
                                     chosen_path(portable));
    }
    return as_tuple(selection);
}

void fill_random_blocks(std::uint64_t seed, std::size_t blocks, nb::handle index_object) {
    const Loaded index = checked_room(index_object, blocks);
    const GilReleased released(index.entries);
    random_blocks(seed, blocks, index.entries, index.as<std::uint32_t>());
}

Layout checked_layout(const std::string& indices, const std::string& values, std::size_t entries) {
    if (entries > (std::size_t{1} << 32) * block_entries)
        refuse("entries = " + number(entries) + " is beyond indices of 32 bits");
    return {format_named<IndexFormat>(indices, "indices", {{"none", IndexFormat::none}, {"delta", IndexFormat::delta}}),
            wire_values_named(values, "value_format"), entries};
}

void check_indices(const Loaded& index, std::size_t end) {
    if (!valid_indices(index.as<std::uint32_t>(), index.entries, end)) refuse_indices(index, end);
}

std::size_t payload_bound(std::size_t count, const std::string& indices, const std::string& values) {
    const Layout layout = checked_layout(indices, values, 0);
    if (count > std::size_t{1} << 32) refuse("count = " + number(count) + " is beyond indices of 32 bits");
    return largest_payload(layout, count);
}

std::size_t encode_units(nb::handle index_object, nb::handle values_object, std::size_t entries, nb::handle out_object,
                         nb::handle residual_object, const std::string& indices,
                         const std::string& value_format) {
    const Layout layout = checked_layout(indices, value_format, entries);
    const Loaded index = required(index_object, "index", Access::read, index_entries);
    const Loaded values = required(values_object, "values", Access::read);
    const Loaded out = required(out_object, "out", Access::write, byte_entries);
    const Loaded residual(residual_object, "residual", Access::write);
    check_entries(values, index.entries * block_entries, "it must hold the values of every index");
    check_entries(residual, entries, "it must be as long as the tensor");
    refuse_overlap({&index, &values, &out, &residual});
    const std::size_t room = largest_payload(layout, index.entries);
    if (out.entries < room) {
        refuse("out has " + number(out.entries) + " bytes, but the payload may need " + number(room) +
               "; ask payload_bound");
    }
    check_indices(index, block_count(layout.entries));
    if (!all_finite(values.data, values.entries)) refuse("values holds a NaN or an infinity, which never travels");
    const GilReleased released(values.entries);
    return encode(layout, {index.as<std::uint32_t>(), values.data, index.entries}, out.as<unsigned char>(),
                  residual.data);
}

void decode_units(nb::handle payload_object, std::size_t entries, nb::handle index_object, nb::handle values_object,
                  const std::string& indices, const std::string& value_format) {
    const Layout layout = checked_layout(indices, value_format, entries);
    const bool given = layout.indices == IndexFormat::none;
    const Loaded payload = required(payload_object, "payload", Access::read, byte_entries);
    const Loaded index = required(index_object, "index", given ? Access::read : Access::write, index_entries);
    const Loaded values = required(values_object, "values", Access::write);
    check_entries(values, index.entries * block_entries, "it must have room for the values of every index");
    refuse_overlap({&payload, &index, &values});
    if (given) check_indices(index, block_count(layout.entries));
    const char* wrong = nullptr;
    {
        const GilReleased released(values.entries);
        wrong = decode(layout, payload.as<unsigned char>(), payload.entries, index.entries, index.as<std::uint32_t>(),
                       values.data);
    }
    if (wrong != nullptr) {
        refuse("the payload of " + number(payload.entries) + " bytes for " + number(index.entries) + " of " +
               number(block_count(layout.entries)) + " units " + wrong + "; drop the message");
    }
}

std::size_t sum_all(nb::handle index_objects, nb::handle values_objects, nb::handle index_object,
                    nb::handle values_object, int threads) {
    const int checked = checked_threads(threads);
    if (!PySequence_Check(index_objects.ptr()) || !PySequence_Check(values_objects.ptr()))
        throw nb::type_error("indices and values must be sequences; pass lists, one entry for each worker");
    const std::size_t count = nb::len(index_objects);
    if (count != nb::len(values_objects))
        refuse(number(count) + " indices but " + number(nb::len(values_objects)) + " values; pass one for each worker");
    if (count > most_inputs) refuse(number(count) + " workers; at most " + number(most_inputs) + " fit one sum");
    const Loaded index = required(index_object, "out_index", Access::write, index_entries);
    const Loaded values = required(values_object, "out_values", Access::write);
    check_entries(values, index.entries * block_entries, "it must have room for the values of every index");
    refuse_overlap({&index, &values});
    std::vector<Loaded> loaded;
    loaded.reserve(2 * count);
    std::vector<Units> inputs;
    std::size_t work = 0;
    for (std::size_t w = 0; w < count; ++w) {
        const std::string place = std::string("[").append(number(w)).append("]");
        const Loaded& i = loaded.emplace_back(
            required(nb::object(index_objects[w]), ("indices" + place).c_str(), Access::read, index_entries));
        const Loaded& v =
            loaded.emplace_back(required(nb::object(values_objects[w]), ("values" + place).c_str(), Access::read));
        check_entries(v, i.entries * block_entries, "it must hold the values of every index");
        check_indices(i, std::size_t{1} << 32);
        refuse_overlap({&i, &index, &values});
        refuse_overlap({&v, &index, &values});
        inputs.push_back({i.as<std::uint32_t>(), v.data, i.entries});
        work += v.entries;
    }
    std::size_t total;
    {
        const GilReleased released(work);
        total = count_union(inputs.data(), count, checked);
        if (total <= index.entries)
            sum_units(inputs.data(), count, index.as<std::uint32_t>(), values.data, checked);
    }
    if (total > index.entries)
        refuse("the sum has " + number(total) + " units but out_index has room for " + number(index.entries));
    return total;
}

std::size_t update_blocks(nb::handle shared_param, nb::handle first, nb::handle second, nb::handle last_step,
                          nb::handle live,
                          nb::handle index, nb::handle values, const std::string& rule, std::int32_t step, double lr,
                          double weight_decay, double momentum_or_beta1, double beta2, double epsilon, double scale,
                          int threads, bool portable) {
    const int checked = checked_threads(threads);
    const UpdateCall call(cpu, shared_param, first, second, last_step, live, index, values, rule, step, lr,
                          weight_decay,
                          momentum_or_beta1, beta2, epsilon, scale);
    check_indices(call.index, block_count(call.shared_param.entries));
    const GilReleased released(call.values.entries);
    return apply_update(call.parameters(), call.update(), call.hyper, checked, chosen_path(portable));
}

void fill_murmur3(nb::handle keys, std::uint32_t seed, nb::handle out) {
    const Loaded key = required(keys, "key", Access::read, index_entries);
    const Loaded hash = required(out, "out", Access::write, index_entries);
    check_entries(hash, key.entries, "it must be as long as key");
    for (std::size_t k = 0; k < key.entries; ++k)
        hash.as<std::uint32_t>()[k] = murmur3(key.as<std::uint32_t>()[k], seed);
}

void stop_pool() {
    const GilReleased released(chunk_entries);
    stop_threads();
}

}  // namespace
}  // namespace atoll_kernels

NB_MODULE(_native_parts, m) {
    using namespace atoll_kernels;
    m.def("difference_block", select_difference, "shared_param"_a.none(), "live"_a.none(), "scale"_a, "threshold"_a,
          "index"_a.none(), "values"_a.none(), "threads"_a = 0, nb::kw_only(), "portable"_a = false);
    m.def("random_blocks", fill_random_blocks, "seed"_a, "blocks"_a, "index"_a.none());
    m.def("payload_bound", payload_bound, "count"_a, "indices"_a, "value_format"_a);
    m.def("encode", encode_units, "index"_a.none(), "values"_a.none(), "entries"_a, "out"_a.none(), "residual"_a.none(),
          "indices"_a, "value_format"_a);
    m.def("decode", decode_units, "payload"_a.none(), "entries"_a, "index"_a.none(), "values"_a.none(),
          "indices"_a, "value_format"_a);
    m.def("sum_units", sum_all, "indices"_a.none(), "values"_a.none(), "out_index"_a.none(), "out_values"_a.none(),
          "threads"_a = 0);
    m.def("update_blocks", update_blocks, "shared_param"_a.none(), "first"_a.none(), "second"_a.none(),
          "last_step"_a.none(),
          "live"_a.none(), "index"_a.none(), "values"_a.none(), "rule"_a, "step"_a, "lr"_a, "weight_decay"_a,
          "momentum_or_beta1"_a, "beta2"_a, "epsilon"_a, "scale"_a, "threads"_a = 0, nb::kw_only(),
          "portable"_a = false);
    m.def("murmur3", fill_murmur3, "key"_a.none(), "seed"_a, "out"_a.none());
    m.def("stop_threads", stop_pool);
    nanobind::module_::import_("atexit").attr("register")(m.attr("stop_threads"));
}
