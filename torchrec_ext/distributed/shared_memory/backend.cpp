// A c10d backend over rings, which takes the place of a group's gloo backend: see sharing.py.
//
// Gloo keeps what is rare in a step: reduce, gather, scatter, send, recv, all_to_all of lists, coalesced and sparse
// collectives, reductions of other types and by bits, and long all_reduces of many ranks.
#include <sys/mman.h>

#include <ATen/ATen.h>
#include <pybind11/chrono.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/headeronly/version.h>

#include "ring.h"

namespace {

using namespace c10d;
using at::Tensor, rings::Bytes, rings::Call, std::chrono::milliseconds;
using Tensors = std::vector<Tensor>;
using Lists = std::vector<Tensors>;
using Parts = std::vector<Bytes>;  // by rank
using Splits = std::vector<int64_t>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;
using Reduction = decltype(rings::Collective::reduce);

// An all_reduce here reads every rank's tensor. From so many ranks on gloo moves fewer bytes.
constexpr int kMany = 8;
constexpr size_t kLong = 64 << 10;

template <typename T, typename A, typename F>
void fold(Bytes out, const std::vector<const char*>& addends, F combine) {
  constexpr size_t kBlock = 2048;  // numbers, which fit into the first cache
  A sums[kBlock];
  for (size_t start = 0, all = out.count / sizeof(T); start < all; start += kBlock) {
    size_t count = std::min(kBlock, all - start);
    for (size_t rank = 0; rank < addends.size(); ++rank) {
      const T* next = reinterpret_cast<const T*>(addends[rank]) + start;
      if (!rank) std::copy(next, next + count, sums);
      else for (size_t i = 0; i < count; ++i) sums[i] = combine(sums[i], static_cast<A>(next[i]));
    }
    for (size_t i = 0; i < count; ++i) reinterpret_cast<T*>(out.at)[start + i] = static_cast<T>(sums[i]);
  }
}

// T: the tensors' type; A: the type of sums, so that 16-bit numbers are rounded once.
template <typename T, typename A = T>
void reduce(Bytes out, const std::vector<const char*>& addends, Call call) {
  switch (call.op) {
    case ReduceOp::PRODUCT: return fold<T, A>(out, addends, [](A a, A b) -> A { return a * b; });
    case ReduceOp::MIN: return fold<T, A>(out, addends, [](A a, A b) { return b < a ? b : a; });
    case ReduceOp::MAX: return fold<T, A>(out, addends, [](A a, A b) { return a < b ? b : a; });
    default: return fold<T, A>(out, addends, [](A a, A b) -> A { return a + b; });
  }
}

// Returns the reduction of a tensor, or nullptr where gloo keeps it.
Reduction reduction(const Tensor& tensor, const ReduceOp& op) {
  if (op.op_ > ReduceOp::MAX || (op.op_ == ReduceOp::AVG && !tensor.is_floating_point())) return nullptr;
  switch (tensor.scalar_type()) {
    case at::kFloat: return reduce<float>;
    case at::kDouble: return reduce<double>;
    case at::kHalf: return reduce<at::Half, float>;
    case at::kBFloat16: return reduce<at::BFloat16, float>;
    case at::kInt: return reduce<int32_t>;
    case at::kLong: return reduce<int64_t>;
    default: return nullptr;
  }
}

enum Kind : uint8_t { kBroadcast, kAllReduce, kAllGather, kReduceScatter, kAllToAll, kBarrier };
// What the profiler shows.
constexpr const char* kEvents[] = {
    "shared_memory:broadcast",      "shared_memory:all_reduce", "shared_memory:all_gather",
    "shared_memory:reduce_scatter", "shared_memory:all_to_all", "shared_memory:barrier"};

std::string describe(Call call) {
  std::string name = std::strchr(kEvents[call.kind], ':') + 1;
  if (call.kind != kBarrier) name += std::string(" of ") + c10::toString(at::ScalarType(call.type));
  return call.kind == kBroadcast ? name + " from rank " + std::to_string(call.root) : name;
}

std::exception_ptr error(const std::string& why) {
  return std::make_exception_ptr(c10::DistBackendError({"", "", 0}, "shared memory: " + why));
}

struct Collective : rings::Collective { Tensors tensors, results; };  // those whose bytes move, and the caller's

class Work : public c10d::Work {
 public:
  Work(std::shared_ptr<rings::Group> group, std::shared_ptr<Collective> collective, milliseconds limit)
      : c10d::Work(group->rank, c10d::OpType::UNKNOWN, kEvents[collective->call.kind]), group_(std::move(group)),
        collective_(std::move(collective)), limit_(limit) {}

  bool isCompleted() override {
    group_->progress();
    if (collective_->state == Collective::kUnderWay) return false;
    // It ends the profiler's event, too.
    finish(collective_->state == Collective::kFailed ? error(collective_->error) : nullptr);
    return true;
  }
  bool wait(milliseconds limit) override {
    group_->wait(*collective_, limit == kNoTimeout ? limit_ : limit);
    if (!isCompleted()) std::rethrow_exception(error("this process was forked while the collective was under way"));
    if (collective_->state == Collective::kFailed) std::rethrow_exception(error(collective_->error));
    return true;
  }
  Tensors result() override { return collective_->results; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (future_) return future_;
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
    group_->then(collective_, [future = future_, collective = collective_] {
      if (collective->state == Collective::kFailed) future->setError(error(collective->error));
      else future->markCompleted(c10::IValue(collective->results));
    });
    return future_;
  }

 private:
  const std::shared_ptr<rings::Group> group_;
  const std::shared_ptr<Collective> collective_;
  const milliseconds limit_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

bool plain(const Tensor& t) { return t.is_cpu() && t.layout() == at::kStrided && !t.is_quantized(); }
bool plain(const Tensors& all) { return std::all_of(all.begin(), all.end(), [](auto& t) { return plain(t); }); }
Bytes bytes(const Tensor& t) { return {static_cast<char*>(t.data_ptr()), t.nbytes()}; }

class Backend : public c10d::Backend {
 public:
  Backend(std::shared_ptr<rings::Group> group, c10::intrusive_ptr<c10d::Backend> gloo)
      : c10d::Backend(group->rank, group->size), group_(std::move(group)), gloo_(std::move(gloo)) {
    init();
  }
  const std::string getBackendName() const override { return "shared_memory"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return gloo_->getBackendOptions(); }
  void setTimeout(milliseconds timeout) override { group_->timeout = timeout; }
  void abort() override { group_->fail("the group was aborted"), group_->progress(); }

  WorkPtr broadcast(Tensors& tensors, const BroadcastOptions& opts) override {
    if (!plain(tensors)) return gloo_->broadcast(tensors, opts);
    auto c = collective(kBroadcast, tensors.at(0), tensors);
    c->call.root = uint8_t(opts.rootRank);
    c->sender = rank_ == opts.rootRank ? rings::kNobody : uint32_t(opts.rootRank);
    if (rank_ == opts.rootRank) share(*c, tensors[0]);
    else c->places[opts.rootRank] = target(*c, tensors[0]);
    return start(c, opts.timeout);
  }

  WorkPtr allreduce(Tensors& tensors, const AllreduceOptions& opts) override {
    Reduction sum = plain(tensors) ? reduction(tensors.at(0), opts.reduceOp) : nullptr;
    if (!sum || (size_ >= kMany && tensors[0].nbytes() > kLong)) return gloo_->allreduce(tensors, opts);
    auto c = collective(kAllReduce, tensors[0], tensors);
    return add(c, sum, share(*c, tensors[0]), tensors[0], opts);
  }

  WorkPtr allgather(Lists& outputs, Tensors& inputs, const AllgatherOptions& opts) override {
    if (!plain(inputs) || !plain(outputs.at(0))) return gloo_->allgather(outputs, inputs, opts);
    auto c = collective(kAllGather, inputs.at(0), outputs[0]);
    Parts places;
    for (auto& t : outputs[0]) places.push_back(target(*c, t));
    return receive(c, share(*c, inputs[0]), places, opts.timeout);
  }
  // Without `override`: torch 2.14 calls these by the names below, and a later one may drop the old names.
  WorkPtr _allgather_base(Tensor& output, Tensor& input, const AllgatherOptions& opts) {
    auto c = collective(kAllGather, input, {output});
    return receive(c, share(*c, input), pieces(*c, output, {}), opts.timeout);
  }
  WorkPtr all_gather_single(Tensor& output, Tensor& input, const AllgatherOptions& opts) {
    return _allgather_base(output, input, opts);
  }

  WorkPtr reduce_scatter(Tensors& outputs, Lists& inputs, const ReduceScatterOptions& opts) override {
    Reduction sum = plain(outputs) && plain(inputs.at(0)) ? reduction(outputs.at(0), opts.reduceOp) : nullptr;
    if (!sum) return gloo_->reduce_scatter(outputs, inputs, opts);
    auto c = collective(kReduceScatter, outputs[0], inputs[0]);
    c->results = outputs;
    Parts parts;
    for (auto& t : inputs[0]) parts.push_back(source(*c, t));
    return add(c, sum, deal(*c, parts), outputs[0], opts);
  }
  WorkPtr _reduce_scatter_base(Tensor& output, Tensor& input, const ReduceScatterOptions& opts) {
    Reduction sum = plain(input) && plain(output) ? reduction(output, opts.reduceOp) : nullptr;
    Tensors outputs{output};
    Lists inputs;
    if (!sum) return inputs.push_back(input.tensor_split(size_)), gloo_->reduce_scatter(outputs, inputs, opts);
    auto c = collective(kReduceScatter, input, outputs);
    return add(c, sum, deal(*c, pieces(*c, input.contiguous(), {})), output, opts);
  }
  WorkPtr reduce_scatter_single(Tensor& output, Tensor& input, const ReduceScatterOptions& opts) {
    return _reduce_scatter_base(output, input, opts);
  }

  WorkPtr alltoall_base(Tensor& output, Tensor& input, Splits& output_splits, Splits& input_splits,
                        const AllToAllOptions& opts) {
    auto c = collective(kAllToAll, input, {output});
    Bytes own = deal(*c, pieces(*c, input.contiguous(), input_splits));
    return receive(c, own, pieces(*c, output, output_splits), opts.timeout);
  }
  WorkPtr all_to_all_single(Tensor& output, Tensor& input, Splits& output_splits, Splits& input_splits,
                            const AllToAllOptions& opts) {
    return alltoall_base(output, input, output_splits, input_splits, opts);
  }

  WorkPtr barrier(const BarrierOptions& opts) override {
    auto c = std::make_shared<Collective>();
    c->call.kind = kBarrier;
    c->places.resize(size_);
    c->shares = {{rings::kEveryone, {}}};
    return start(c, opts.timeout);
  }

  WorkPtr alltoall(Tensors& out, Tensors& in, const AllToAllOptions& o) override { return gloo_->alltoall(out, in, o); }
  WorkPtr allreduce_coalesced(Tensors& tensors, const AllreduceCoalescedOptions& opts) override {
    return gloo_->allreduce_coalesced(tensors, opts);
  }
  WorkPtr allgather_coalesced(Lists& to, Tensors& from, const AllgatherOptions& opts) override {
    return gloo_->allgather_coalesced(to, from, opts);
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& to, Tensors& from, const AllgatherOptions& opts) {
    return gloo_->allgather_into_tensor_coalesced(to, from, opts);
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& to, Tensors& from, const ReduceScatterOptions& opts) {
    return gloo_->reduce_scatter_tensor_coalesced(to, from, opts);
  }
  WorkPtr reduce(Tensors& tensors, const ReduceOptions& opts) override { return gloo_->reduce(tensors, opts); }
  WorkPtr gather(Lists& to, Tensors& from, const GatherOptions& opts) override { return gloo_->gather(to, from, opts); }
  WorkPtr scatter(Tensors& to, Lists& from, const ScatterOptions& o) override { return gloo_->scatter(to, from, o); }
  WorkPtr send(Tensors& tensors, int to, int tag) override { return gloo_->send(tensors, to, tag); }
  WorkPtr recv(Tensors& tensors, int from, int tag) override { return gloo_->recv(tensors, from, tag); }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override { return gloo_->recvAnysource(tensors, tag); }

 private:
  using Ptr = std::shared_ptr<Collective>;

  Ptr collective(Kind kind, const Tensor& tensor, Tensors results) const {
    auto c = std::make_shared<Collective>();
    c->call.kind = kind;
    c->call.type = uint8_t(tensor.scalar_type());
    c->places.resize(size_);
    for (auto& t : results)
      TORCH_CHECK(t.scalar_type() == tensor.scalar_type(), "shared memory: ", describe(c->call), ", ", t.scalar_type());
    c->results = std::move(results);
    return c;
  }
  // Returns a tensor's bytes, which stay as long as the collective.
  static Bytes source(Collective& c, const Tensor& tensor) {
    c.tensors.push_back(tensor.contiguous());
    return bytes(c.tensors.back());
  }
  // Returns the bytes that will become a tensor's at the end, divided by `divisor`.
  static Bytes target(Collective& c, const Tensor& tensor, int divisor = 1) {
    Tensor whole = tensor.is_contiguous() ? tensor : at::empty(tensor.sizes(), tensor.options());
    c.tensors.push_back(whole);
    if (divisor > 1 || !whole.is_same(tensor)) {
      c.finish = [before = std::move(c.finish), tensor, whole, divisor] {
        if (before) before();
        at::AutoDispatchBelowADInplaceOrView below;  // autograd does not see it, as it does not see gloo's writes
        if (divisor > 1) whole.div_(divisor);
        if (!whole.is_same(tensor)) tensor.copy_(whole);
      };
    }
    return bytes(whole);
  }
  // Returns the parts of a tensor, cut in its first dimension; equal ones where no splits are given.
  Parts pieces(Collective& c, const Tensor& tensor, const Splits& splits) const {
    TORCH_CHECK(plain(tensor) && tensor.is_contiguous(), "shared memory: needs a contiguous tensor on the CPU");
    int64_t rows = splits.empty() ? size_ : tensor.size(0), sum = splits.empty() ? rows : 0;
    for (int64_t split : splits) sum += split;
    bool fit = sum == rows && (splits.empty() ? tensor.numel() % size_ == 0 : int(splits.size()) == size_);
    TORCH_CHECK(fit, "shared memory: ", size_, " ranks cannot split ", tensor.sizes(), " by ", splits);
    Parts parts;
    char* at = source(c, tensor).at;
    for (int rank = 0; rank < size_; ++rank) {
      parts.push_back({at, rows ? tensor.nbytes() / rows * (splits.empty() ? 1 : splits[rank]) : 0});
      at += parts[rank].count;
    }
    return parts;
  }

  // Sends every peer the whole tensor, or each its part; returns this rank's own.
  static Bytes share(Collective& c, const Tensor& tensor) {
    c.shares = {{rings::kEveryone, source(c, tensor)}};
    return c.shares[0].second;
  }
  Bytes deal(Collective& c, const Parts& parts) const {
    TORCH_CHECK(int(parts.size()) == size_, "shared memory: ", parts.size(), " tensors for ", size_, " ranks");
    for (int peer = 0; peer < size_; ++peer)
      if (peer != rank_) c.shares.push_back({uint32_t(peer), parts[peer]});
    return parts[rank_];
  }
  WorkPtr receive(Ptr c, Bytes own, Parts places, milliseconds limit) {
    TORCH_CHECK(int(places.size()) == size_ && places[rank_].count == own.count, "shared memory: rank ", rank_,
                " sends itself ", own.count, " bytes that it does not expect");
    if (own.count && own.at != places[rank_].at) std::memcpy(places[rank_].at, own.at, own.count);
    c->places = std::move(places);
    return start(c, limit);
  }
  template <typename Options>
  WorkPtr add(Ptr c, Reduction sum, Bytes own, const Tensor& output, const Options& opts) {
    c->call.op = opts.reduceOp.op_;
    c->reduce = sum;
    c->own = own.at;
    c->places[rank_] = target(*c, output, c->call.op == ReduceOp::AVG ? size_ : 1);
    TORCH_CHECK(own.count == output.nbytes(), "shared memory: reduces ", own.count, " bytes to ", output.nbytes());
    return start(c, opts.timeout);
  }
  WorkPtr start(Ptr c, milliseconds limit) {
    auto work = c10::make_intrusive<Work>(group_, c, limit == kUnsetTimeout ? milliseconds(0) : limit);
    std::string why = group_->issue(c);
    if (!why.empty()) std::rethrow_exception(error(why));
    return work;
  }

  const std::shared_ptr<rings::Group> group_;
  const c10::intrusive_ptr<c10d::Backend> gloo_;
};

// Maps the memory behind a descriptor, which all ranks have opened, and returns a backend over it.
c10::intrusive_ptr<c10d::Backend> make_backend(int memory, int rank, int size, std::vector<int> pids,
                                               milliseconds timeout, const c10::intrusive_ptr<c10d::Backend>& gloo) {
  size_t bytes = rings::Group::memory_bytes(size);
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory, 0);
  TORCH_CHECK(at != MAP_FAILED, "shared memory: mmap of ", bytes, " bytes: ", std::strerror(errno));
  std::shared_ptr<char> base(static_cast<char*>(at), [bytes](char* start) { munmap(start, bytes); });
  auto group = std::make_shared<rings::Group>(base, rank, size, std::move(pids), timeout, describe);
  rings::helper->add(group);
  return c10::make_intrusive<Backend>(group, gloo);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  module.def("make_backend", &make_backend, py::call_guard<py::gil_scoped_release>());
  module.def("memory_bytes", &rings::Group::memory_bytes);
  module.attr("torch") = TORCH_VERSION;
}
