// A c10d backend over rings, which takes the place of a group's gloo backend: see sharing.py. Gloo keeps what is rare
// in a step: reduce, gather, scatter, send, recv, collectives of lists but all_gather, coalesced and sparse ones, long
// all_reduces of many ranks, and reductions of other types than numbers or but for the sum and the greatest.
#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/OpMathType.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include <thread>

#include "ring.h"

namespace {

using namespace c10d;
using at::Tensor, rings::Bytes, std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Splits = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

// An all_reduce here reads every rank's tensor. From so many ranks on gloo moves fewer bytes.
constexpr int kMany = 8;
constexpr size_t kLong = 64 << 10;

// The sum, or the greatest. T: the tensors' type; A: the type of sums, so that 16-bit numbers are rounded once.
template <bool kMost, typename T, typename A = at::opmath_type<T>>
void fold(Bytes out, const std::vector<const char*>& addends) {
  constexpr size_t kBlock = 2048;  // numbers, which fit into the first cache
  A sums[kBlock];
  for (size_t start = 0, all = out.count / sizeof(T); start < all; start += kBlock) {
    size_t count = std::min(kBlock, all - start);
    for (size_t rank = 0; rank < addends.size(); ++rank) {
      const T* next = reinterpret_cast<const T*>(addends[rank]) + start;
      if (!rank) std::copy(next, next + count, sums);
      else for (size_t i = 0; i < count; ++i) sums[i] = kMost ? std::max(sums[i], A(next[i])) : sums[i] + A(next[i]);
    }
    for (size_t i = 0; i < count; ++i) reinterpret_cast<T*>(out.at)[start + i] = static_cast<T>(sums[i]);
  }
}

// Returns the reduction of a tensor, or nullptr where gloo keeps it.
decltype(rings::Collective::reduce) reduction(const Tensor& tensor, const ReduceOp& op) {
  bool greatest = op.op_ == ReduceOp::MAX, number = !tensor.is_complex() && tensor.scalar_type() != at::kBool;
  if (!number || !(greatest || op.op_ == ReduceOp::SUM)) return nullptr;
  return AT_DISPATCH_ALL_TYPES_AND2(at::kHalf, at::kBFloat16, tensor.scalar_type(), "all_reduce", [greatest] {
    return greatest ? fold<true, scalar_t> : fold<false, scalar_t>;
  });
}

std::exception_ptr error(const std::string& why) {
  return std::make_exception_ptr(c10::DistBackendError({"", "", 0}, "shared memory: " + why));
}

// A collective, to the rings and to torch.
class Work : public c10d::Work, public rings::Collective {
 public:
  // `title` is what the profiler shows; `results` are the caller's tensors.
  Work(std::shared_ptr<rings::Group> group, const char* title, Tensors results)
      : c10d::Work(group->rank, c10d::OpType::UNKNOWN, title), group_(group), results_(results) {
    places.resize(group->size);
  }

  rings::CollectivePtr shared() {
    return {this, [work = c10::intrusive_ptr<Work>::reclaim_copy(this)](auto*) {}};
  }
  // Returns the bytes of a tensor, or of a contiguous copy.
  Bytes source(const Tensor& tensor) {
    kept_.push_back(tensor.contiguous());
    return {static_cast<char*>(kept_.back().data_ptr()), kept_.back().nbytes()};
  }
  // Returns bytes that are a tensor's at the end.
  Bytes target(const Tensor& tensor) {
    Bytes bytes = source(tensor);
    if (!tensor.is_contiguous()) strided_.emplace_back(tensor, kept_.back());
    return bytes;
  }
  void arrived() override {
    at::AutoDispatchBelowADInplaceOrView below;  // autograd does not see it, as it does not see gloo's writes
    for (auto& [tensor, whole] : strided_) tensor.copy_(whole);
  }

  bool isCompleted() override {
    group_->progress();
    if (state == kUnderWay) return false;
    // It ends the profiler's event, too.
    finish(state == kFailed ? error(why) : nullptr);
    return true;
  }
  bool wait(milliseconds limit) override {
    group_->wait(*this, limit);
    if (!isCompleted()) std::rethrow_exception(error("this process was forked while the collective was under way"));
    if (state == kFailed) std::rethrow_exception(error(why));
    return true;
  }
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    group_->then(shared(), [this, future = future_] {
      if (state == kFailed) future->setError(error(why));
      else future->markCompleted(c10::IValue(results_));
    });
    return future_;
  }

 private:
  const std::shared_ptr<rings::Group> group_;
  const Tensors results_;
  Tensors kept_;                                    // contiguous ones, whose bytes move
  std::vector<std::pair<Tensor, Tensor>> strided_;  // results that are not contiguous, and those in their place
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

bool plain(const Tensor& t) { return t.is_cpu() && t.layout() == at::kStrided && !t.is_quantized(); }
bool plain(const Tensors& all) { return std::all_of(all.begin(), all.end(), [](auto& t) { return plain(t); }); }

class Backend : public c10d::Backend {
 public:
  Backend(std::shared_ptr<rings::Group> group, c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(group->rank, group->size), group_(std::move(group)), gloo_(std::move(gloo)) {
    init();
  }
  ~Backend() override { group_->close(); }
  const std::string getBackendName() const override { return "shared_memory"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(milliseconds timeout) override { group_->timeout = timeout; }
  void abort() override { group_->fail("the group was aborted"), group_->progress(); }

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& opts) override {
    if (!plain(tensors)) return gloo_->broadcast(tensors, opts);
    std::string root = " from rank " + std::to_string(opts.rootRank);
    auto c = collective("shared_memory:broadcast", tensors.at(0), tensors, root);
    c->sender = int(opts.rootRank);
    c->sends = {c->target(tensors[0])};
    c->places.at(c->sender) = c->sends[0];
    return start(c);
  }

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& opts) override {
    auto sum = plain(tensors) ? reduction(tensors.at(0), opts.reduceOp) : nullptr;
    if (!sum || (size_ >= kMany && tensors[0].nbytes() > kLong)) return gloo_->allreduce(tensors, opts);
    auto c = collective("shared_memory:all_reduce", tensors[0], tensors, opts.reduceOp == ReduceOp::MAX ? " MAX" : "");
    c->reduce = sum;
    c->sends = {c->target(tensors[0])};
    c->places.assign(size_, c->sends[0]);
    return start(c);
  }

  WorkPtr allgather(Lists& outputs, Tensors& inputs, const AllgatherOptions& opts) override {
    if (!plain(inputs) || !plain(outputs.at(0))) return gloo_->allgather(outputs, inputs, opts);
    auto c = collective("shared_memory:all_gather", inputs.at(0), outputs[0]);
    c->sends = {c->source(inputs[0])};
    for (int rank = 0; rank < size_; ++rank) c->places[rank] = c->target(outputs[0].at(rank));
    return start(c);
  }
  // Without `override`: torch 2.14 calls these by the names below, and a later one may drop the old names.
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions& opts) {
    auto c = collective("shared_memory:all_gather", input, {output});
    c->sends = {c->source(input)};
    c->places = pieces(*c, output, {});
    return start(c);
  }
  WorkPtr all_gather_single(Tensor& output, Tensor& input, const AllgatherOptions& opts) {
    return _allgather_base(output, input, opts);
  }

  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const ReduceScatterOptions& opts) {
    auto sum = plain(input) && plain(output) ? reduction(output, opts.reduceOp) : nullptr;
    if (!sum) return gloo_->_reduce_scatter_base(output, input, opts);
    auto c = collective("shared_memory:reduce_scatter", input, {output});
    c->reduce = sum;
    c->sends = pieces(*c, input.contiguous(), {});
    c->places.assign(size_, c->target(output));
    return start(c);
  }
  WorkPtr reduce_scatter_single(Tensor& output, Tensor& input, const ReduceScatterOptions& opts) {
    return _reduce_scatter_base(output, input, opts);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, Splits& output_splits, Splits& input_splits,
                        const AllToAllOptions& opts) {
    auto c = collective("shared_memory:all_to_all", input, {output});
    c->sends = pieces(*c, input.contiguous(), input_splits);
    c->places = pieces(*c, output, output_splits);
    return start(c);
  }
  WorkPtr all_to_all_single(Tensor& output, Tensor& input, Splits& output_splits, Splits& input_splits,
                            const AllToAllOptions& opts) {
    return alltoall_base(output, input, output_splits, input_splits, opts);
  }

  WorkPtr barrier(const BarrierOptions&) override {
    auto c = collective("shared_memory:barrier", {}, {});
    c->sends.resize(1);
    return start(c);
  }

  // Gloo keeps the rest.
#define GLOO(name, To, From, Options) \
  WorkPtr name(To& to, From& from, const Options& opts) { return gloo_->name(to, from, opts); }
  GLOO(alltoall, Tensors, Tensors, AllToAllOptions)
  GLOO(allgather_coalesced, Lists, Tensors, AllgatherOptions)
  GLOO(allgather_into_tensor_coalesced, Tensors, Tensors, AllgatherOptions)
  GLOO(reduce_scatter, Tensors, Lists, ReduceScatterOptions)
  GLOO(reduce_scatter_tensor_coalesced, Tensors, Tensors, ReduceScatterOptions)
  GLOO(gather, Lists, Tensors, GatherOptions)
  GLOO(scatter, Tensors, Lists, ScatterOptions)
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& opts) override {
    return gloo_->allreduce_coalesced(tensors, opts);
  }
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& opts) override { return gloo_->reduce(tensors, opts); }
  WorkPtr send(Tensors& tensors, int to, int tag) override { return gloo_->send(tensors, to, tag); }
  WorkPtr recv(Tensors& tensors, int from, int tag) override { return gloo_->recv(tensors, from, tag); }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override { return gloo_->recvAnysource(tensors, tag); }

 private:
  c10::intrusive_ptr<Work> collective(const char* title, const Tensor& tensor, Tensors results,
                                      const std::string& more = "") const {
    auto c = c10::make_intrusive<Work>(group_, title, results);
    std::string words = std::strchr(title, ':') + 1;
    if (tensor.defined()) words += std::string(" of ") + c10::toString(tensor.scalar_type()) + more;
    std::copy_n(words.begin(), std::min(words.size(), c->call.size() - 1), c->call.begin());
    for (auto& t : results)
      TORCH_CHECK(t.scalar_type() == tensor.scalar_type(), "shared memory: ", words, ", ", t.scalar_type());
    return c;
  }
  // Returns the parts of a tensor by rank, cut in its first dimension; equal ones where no splits are given.
  std::vector<Bytes> pieces(Work& c, const Tensor& tensor, const Splits& splits) const {
    TORCH_CHECK(plain(tensor) && tensor.is_contiguous(), "shared memory: needs a contiguous tensor on the CPU");
    checkSplitSizes(splits, tensor, size_);
    std::vector<size_t> lengths(size_), offsets(size_);
    computeLengthsAndOffsets(splits, tensor, &lengths, &offsets);
    char* at = c.source(tensor).at;
    std::vector<Bytes> parts;
    for (int rank = 0; rank < size_; ++rank)
      parts.push_back({at + offsets[rank] * tensor.itemsize(), lengths[rank] * tensor.itemsize()});
    return parts;
  }
  WorkPtr start(c10::intrusive_ptr<Work> c) {
    std::string why = group_->issue(c->shared());
    if (!why.empty()) std::rethrow_exception(error(why));
    return c;
  }

  const std::shared_ptr<rings::Group> group_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

// Returns a backend over memory that all ranks have mapped.
c10::intrusive_ptr<c10d::Backend> make_backend(const Tensor& memory, std::vector<int> pids, milliseconds timeout,
                                               const c10::intrusive_ptr<c10d::Backend>& gloo) {
  std::shared_ptr<char> base(static_cast<char*>(memory.data_ptr()), [storage = memory.storage()](char*) {});
  auto group = std::make_shared<rings::Group>(base, gloo->getRank(), gloo->getSize(), pids, timeout);
  std::thread([group] { group->help(); }).detach();
  return c10::make_intrusive<Backend>(group, gloo);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("make_backend", &make_backend, py::call_guard<py::gil_scoped_release>());
  module.def("memory_bytes", &rings::Group::memory_bytes);
  module.attr("torch") = TORCH_VERSION;
}
