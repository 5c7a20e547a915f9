// A simulated CUDA device for a CPU build of torch. A tensor on cuda:N lies in host memory; CPU kernels compute on it.
//
// What makes this possible: a CPU build has the dispatch key CUDA, but no kernel under it. One boxed fallback under that
// key takes every op, calls the CPU kernel on views of the same memory, and labels the results as tensors on the device.
// Four more registrations replace the rest of libtorch_cuda: the allocator, the device guard (streams and events), the
// hooks (pinned memory, generators), and the few ops that handle storages. simulated_cuda.py is the Python half.
//
// Everything runs at once and in order, so the results are those of a CPU. CUDA's rules are checked beside it: which
// calls wait, what two streams do to one memory without an order, what a graph capture forbids. A listener is told.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Work.hpp>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <unordered_map>

namespace simulated {
using at::Tensor;
using c10::DispatchKey;
using c10::IValue;

constexpr int kMostDevices = 8;
constexpr size_t kMemory = 64ull << 30;
int g_devices = 1;
int g_sync_debug_mode = 0;
thread_local c10::DeviceIndex t_device = 0;  // as in CUDA, every thread begins on device 0
thread_local int64_t t_streams[kMostDevices] = {};
// One lock for all bookkeeping. It is never held while Python runs, whose lock another thread may hold.
std::recursive_mutex g_lock;
using Locked = std::lock_guard<std::recursive_mutex>;

int64_t key_of(c10::Stream stream) { return stream.device_index() * 1000 + stream.id(); }
int64_t current() { return t_device * 1000 + t_streams[t_device]; }

using Listener = void (*)(const char* kind, const char* what);
std::atomic<Listener> g_listener{nullptr};
void tell(const char* kind, const std::string& what) {
  if (auto listener = g_listener.load()) listener(kind, what.c_str());
}

// ---------------------------------------------------------------- order between streams: vector clocks
using Clock = std::map<int64_t, int64_t>;  // by stream, the number of its ops that are known to be over
std::map<int64_t, Clock> g_clocks;         // by stream, what its next op comes after
Clock g_host;                              // what the next call of the host comes after
void merge(Clock& into, const Clock& from) {
  for (auto [stream, time] : from) into[stream] = std::max(into[stream], time);
}

struct Access {
  int64_t stream, time;
  const char* op;
};
struct Block {  // one allocation
  void* data;
  size_t bytes;
  int64_t number, home;
  Tensor owner;  // of memory that a CPU kernel allocated
  bool fresh = true;
  Access write;
  std::map<int64_t, Access> reads;
  std::set<int64_t> recorded;
};
using Touched = std::vector<std::pair<Block*, bool>>;  // whether it is written
std::map<int64_t, std::vector<Access>> g_returned;     // by home stream, unfinished uses of memory that was freed

// Starts an op on a stream; finds accesses that nothing orders after the earlier ones.
void launch(const char* op, const Touched& touched) {
  std::vector<std::string> unordered;
  {
    Locked lock(g_lock);
    auto& clock = g_clocks[current()];
    merge(clock, g_host);
    Access now{current(), ++clock[current()], op};
    auto check = [&](const Access& earlier, const char* how) {
      if (clock[earlier.stream] < earlier.time) unordered.push_back(c10::str(op, " ", how, " ", earlier.op));
    };
    for (auto [block, written] : touched) {
      if (written && std::exchange(block->fresh, false)) {
        // The allocator gives freed memory to the next op of its stream, so an unfinished use elsewhere reads garbage.
        for (auto& use : g_returned[block->home]) check(use, "writes memory that was freed under");
        g_returned[block->home].clear();
      }
      check(block->write, written ? "writes after a write of" : "reads after a write of");
      if (!written) {
        block->reads[now.stream] = now;
        continue;
      }
      for (auto& [stream, read] : block->reads) check(read, "writes after a read of");
      block->reads.clear();
      block->write = now;
    }
  }
  for (auto& each : unordered) tell("unordered", each);
}

// ---------------------------------------------------------------- random numbers
// Draws from a CPU generator, since CPU kernels take no other. The default one shares that of the host, so that a run on
// the device draws what a run on the CPU draws.
struct Generator final : c10::GeneratorImpl {
  at::Generator host;
  bool in_capture = false;
  Generator(c10::DeviceIndex device, at::Generator host)
      : GeneratorImpl(c10::Device(c10::kCUDA, device), c10::DispatchKeySet(DispatchKey::CUDA)), host(std::move(host)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return host.get_offset(); }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    auto* other = static_cast<Generator*>(state.get());
    set_state(*other->get_state());
    in_capture = other->in_capture;
  }
  Generator* clone_impl() const override {
    auto* copy = new Generator(device().index(), host.clone());
    copy->in_capture = in_capture;
    return copy;
  }
};
const at::Generator& default_generator(c10::DeviceIndex device) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> generators;
    auto& host = at::detail::getDefaultCPUGenerator();
    for (int i = 0; i < kMostDevices; ++i) generators.push_back(at::make_generator<Generator>(i, host));
    return generators;
  }();
  return all.at(device < 0 ? t_device : device);
}

// ---------------------------------------------------------------- graphs
// A tensor of a storage with the sizes of another one.
Tensor view_of(c10::Storage storage, DispatchKey key, const Tensor& like) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return tensor;
}

// Applies a change to the tensors in an argument: a tensor, a list, an optional one, a list of lists.
template <typename Change>
IValue each_tensor(const IValue& value, Change change) {
  if (value.isTensor()) return value.toTensor().defined() ? change(value.toTensor()) : value;
  if (!value.isList()) return value;
  auto list = value.toList();
  c10::impl::GenericList changed(list.elementType());
  for (const IValue& item : list) changed.push_back(each_tensor(item, change));
  return changed;
}

struct Call {
  c10::OperatorHandle op;
  std::vector<IValue> args, outputs;
};
struct Graph {
  std::string mode;
  std::thread::id thread;
  int64_t origin, first_block;
  std::set<int64_t> streams;
  bool broken = false;
  std::vector<Call> calls;
  std::map<Block*, bool> touched;
  // Of memory from before the capture: how many references the calls keep, and the content that the capture overwrote.
  std::map<c10::StorageImpl*, size_t> outside;
  std::map<c10::StorageImpl*, std::pair<c10::Storage, std::string>> before;
  Tensor random;
};
std::map<int64_t, Graph> g_graphs;
std::atomic<Graph*> g_capture{nullptr};

bool is_capturing(int64_t stream) {
  Locked lock(g_lock);
  return g_capture && g_capture.load()->streams.count(stream);
}

// Refuses a call that CUDA forbids during a capture: of any thread in mode "global", else of the capturing thread.
void forbid_in_capture(const std::string& what) {
  Locked lock(g_lock);
  Graph* graph = g_capture;
  if (!graph) return;
  bool own = graph->thread == std::this_thread::get_id() || is_capturing(current());
  if (!own && graph->mode != "global") return;
  graph->broken = true;
  TORCH_CHECK(false, "CUDA error: operation not permitted when stream is capturing: ", what);
}
void draw(const at::Generator& generator) {
  auto* impl = static_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  bool capturing = is_capturing(current());
  TORCH_CHECK(!capturing || impl->in_capture, "Attempt to increase offset for a CUDA generator not in capture mode.");
  TORCH_CHECK(capturing || !impl->in_capture, "Offset increment outside graph capture encountered unexpectedly.");
}

// ---------------------------------------------------------------- memory
int64_t g_blocks = 0;
size_t g_bytes = 0, g_peak = 0;
Block* new_block(void* data, size_t bytes, Tensor owner = {}) {
  // A graph's own pool serves its streams only; elsewhere an allocation may have to call cudaMalloc.
  if (!is_capturing(current())) forbid_in_capture("cudaMalloc outside of the graph's memory pool");
  Locked lock(g_lock);
  TORCH_CHECK_WITH(OutOfMemoryError, g_bytes + bytes <= kMemory, "CUDA out of memory: ", bytes, " bytes more.");
  g_peak = std::max(g_peak, g_bytes += bytes);
  return new Block{data, bytes, ++g_blocks, current(), std::move(owner), true, {current(), 0, ""}};
}
void release(void* context) {
  std::unique_ptr<Block> block(static_cast<Block*>(context));
  Locked lock(g_lock);
  g_bytes -= block->bytes;
  block->reads[-1] = block->write;
  merge(g_clocks[block->home], g_host);
  for (auto& [_, use] : block->reads) {
    bool is_over = block->recorded.count(use.stream) || g_clocks[block->home][use.stream] >= use.time;
    if (!is_over) g_returned[block->home].push_back(use);
  }
  for (auto& [_, graph] : g_graphs) graph.touched.erase(block.get());
  if (!block->owner.defined()) free(block->data);
}
c10::DataPtr device_memory(size_t bytes) {
  auto* block = new_block(nullptr, bytes);
  if (bytes) block->data = aligned_alloc(64, (bytes + 63) / 64 * 64);
  return {block->data, block, &release, c10::Device(c10::kCUDA, t_device)};
}
Block* block_of(const c10::StorageImpl& storage) {
  return storage.data_ptr().get_deleter() == &release ? static_cast<Block*>(storage.data_ptr().get_context()) : nullptr;
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override { return device_memory(bytes); }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
} g_allocator;

std::map<const char*, size_t> g_pinned;
void unpin(void* data) {
  Locked lock(g_lock);
  g_pinned.erase(static_cast<char*>(data));
  free(data);
}
struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    forbid_in_capture("cudaHostAlloc");
    auto* data = static_cast<char*>(aligned_alloc(64, bytes / 64 * 64 + 64));
    Locked lock(g_lock);
    g_pinned[data] = bytes + 1;
    return {data, data, &unpin, c10::Device(c10::kCPU)};
  }
  void copy_data(void* to, const void* from, std::size_t count) const override { default_copy_data(to, from, count); }
} g_pinned_allocator;
bool is_pinned(const void* data) {
  Locked lock(g_lock);
  auto next = g_pinned.upper_bound(static_cast<const char*>(data));
  return next != g_pinned.begin() && data < (--next)->first + next->second;
}

// ---------------------------------------------------------------- streams, events, copies under way
// An asynchronous copy to the host shows NaN until somebody waits for it, so that a missing wait is seen.
struct Copy {
  int64_t stream, time;
  Tensor to, values;
};
std::vector<Copy> g_copies;
// The host knows that what a clock counts is over: copies arrive.
void arrive(const Clock& clock) {
  std::vector<Copy> due, rest;
  {
    Locked lock(g_lock);
    merge(g_host, clock);
    for (auto& copy : g_copies) (g_host[copy.stream] >= copy.time ? due : rest).push_back(copy);
    g_copies.swap(rest);
  }
  at::NoGradGuard guard;
  for (auto& copy : due) copy.to.copy_(copy.values);
}
// The host waits for the device.
void wait(const char* kind, const std::string& what, const Clock& clock) {
  tell(kind, what);
  forbid_in_capture(what);
  // As in torch, the debug mode takes no offence at an event, nor at a call whose name is to synchronize.
  bool accidental = !strcmp(kind, "sync") && what != "cudaDeviceSynchronize";
  TORCH_CHECK(g_sync_debug_mode < 2 || !accidental, "called a synchronizing CUDA operation: ", what);
  arrive(clock);
}
Clock clock_of(int64_t stream) {
  Locked lock(g_lock);
  return g_clocks[stream];
}

struct Event {
  Clock clock;
  bool captured;
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  static c10::DeviceIndex index(c10::Device device) { return device.index() < 0 ? t_device : device.index(); }
  static c10::Stream stream(c10::DeviceIndex device, int64_t id) {
    return c10::Stream(c10::Stream::UNSAFE, {c10::kCUDA, device}, id);
  }
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    return {c10::kCUDA, std::exchange(t_device, index(device))};
  }
  c10::Device getDevice() const override { return {c10::kCUDA, t_device}; }
  void setDevice(c10::Device device) const override { t_device = index(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { t_device = index(device); }
  c10::Stream getStream(c10::Device device) const override { return stream(index(device), t_streams[index(device)]); }
  c10::Stream getDefaultStream(c10::Device device) const override { return stream(index(device), 0); }
  c10::Stream getNewStream(c10::Device device, int = 0) const override {
    static std::atomic<int64_t> count{0};
    return stream(index(device), ++count);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool = false) const override { return getNewStream(device); }
  c10::Stream exchangeStream(c10::Stream next) const override {
    return stream(next.device_index(), std::exchange(t_streams[next.device_index()], next.id()));
  }
  c10::DeviceIndex deviceCount() const noexcept override { return g_devices; }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    Locked lock(g_lock);
    destroyEvent(*event, 0);
    merge(g_clocks[key_of(stream)], g_host);
    *event = new Event{g_clocks[key_of(stream)], is_capturing(key_of(stream))};
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void block(void* given, const c10::Stream& stream) const override {
    auto* event = static_cast<Event*>(given);
    if (!event) return;
    Locked lock(g_lock);
    // A stream that waits for one in a capture joins the capture; a wait for work outside would be lost in a replay.
    if (g_capture && event->captured) g_capture.load()->streams.insert(key_of(stream));
    if (is_capturing(key_of(stream)) && !event->captured) forbid_in_capture("a wait for work outside of the capture");
    merge(g_clocks[key_of(stream)], event->clock);
  }
  bool queryEvent(void* event) const override {
    if (event) arrive(static_cast<Event*>(event)->clock);
    return true;
  }
  void synchronizeEvent(void* event) const override {
    if (event) wait("event", "cudaEventSynchronize", static_cast<Event*>(event)->clock);
  }
  bool queryStream(const c10::Stream& stream) const override {
    arrive(clock_of(key_of(stream)));
    return true;
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    wait("sync", "cudaStreamSynchronize", clock_of(key_of(stream)));
  }
  void synchronizeDevice(const c10::DeviceIndex) const override {
    Clock all;
    {
      Locked lock(g_lock);
      for (auto& [_, clock] : g_clocks) merge(all, clock);
    }
    wait("sync", "cudaDeviceSynchronize", all);
  }
  bool isStreamCapturing(const c10::Stream& stream) const override { return is_capturing(key_of(stream)); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Locked lock(g_lock);
    if (data.get_deleter() == &release) static_cast<Block*>(data.get_context())->recorded.insert(key_of(stream));
  }
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 1.0; }
};

// ---------------------------------------------------------------- ops
// The operands of one call as CPU tensors on the same memory, and the way back.
struct Operands {
  std::map<c10::StorageImpl*, c10::Storage> host_of;
  std::map<void*, c10::Storage> device_of;  // by the first byte
  std::vector<std::pair<Tensor, Tensor>> pairs;
  std::map<Block*, bool> touched;
  std::string on_host;

  Tensor host(const Tensor& tensor, bool written) {
    if (!tensor.is_cuda()) {
      if (tensor.dim() > 0) on_host = c10::str(tensor.sizes());
      return tensor;
    }
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (auto* block = block_of(*storage)) touched[block] |= written;
    if (written) save(*storage);
    for (auto& [device, host] : pairs)
      if (device.is_same(tensor)) return host;
    if (!host_of.count(storage)) {
      // The view keeps the memory alive: a collective may still read it when this call has returned.
      void* data = storage->mutable_data();
      auto drop = [](void* owner) { delete static_cast<c10::Storage*>(owner); };
      c10::DataPtr alias(data, new c10::Storage(tensor.storage()), drop, c10::kCPU);
      host_of.emplace(storage, c10::Storage(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(alias),
                                            c10::GetAllocator(c10::kCPU), true));
      if (data) device_of.emplace(data, tensor.storage());
    }
    auto view = view_of(host_of[storage], DispatchKey::CPU, tensor);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) view.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs.emplace_back(tensor, view);
    return view;
  }
  IValue host(const IValue& value, bool written) {
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    if (value.isGenerator()) {
      auto* generator = value.toGenerator().unsafeGetGeneratorImpl();
      TORCH_CHECK(generator->device().is_cuda(), "Expected a 'cuda' device type for generator but found 'cpu'");
      return static_cast<Generator*>(generator)->host;
    }
    return each_tensor(value, [&](const Tensor& tensor) { return host(tensor, written); });
  }
  Tensor device(const Tensor& tensor) {
    if (tensor.is_cuda()) return tensor;
    for (auto& [device, host] : pairs)
      if (host.is_same(tensor)) return device;
    void* data = tensor.storage().mutable_data();
    if (data && device_of.count(data)) return view_of(device_of[data], DispatchKey::CUDA, tensor);
    c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), adopt(tensor), &g_allocator, true);
    if (data) device_of.emplace(data, storage);
    return view_of(storage, DispatchKey::CUDA, tensor);
  }
  // Device memory that a CPU kernel allocated.
  c10::DataPtr adopt(const Tensor& tensor) {
    void* data = tensor.storage().mutable_data();
    auto* block = new_block(data, tensor.storage().nbytes(), tensor);
    touched[block] = true;
    return {data, block, &release, c10::Device(c10::kCUDA, t_device)};
  }
  // Follows a CPU kernel that gave an operand other sizes or other memory, as resize_ and out= do.
  void resized() {
    for (auto& [device, host] : pairs) {
      auto* storage = device.storage().unsafeGetStorageImpl();
      if (host.storage().data() != storage->data() || host.storage().nbytes() != storage->nbytes()) {
        touched.erase(block_of(*storage));
        storage->set_data_ptr_noswap(adopt(host));
        storage->set_nbytes(host.storage().nbytes());
      }
      if (host.sizes() != device.sizes() || host.strides() != device.strides())
        device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }
  // A capture runs nothing on a GPU, but here, so it keeps the content of what it writes, to put it back.
  static void save(c10::StorageImpl& storage) {
    Locked lock(g_lock);
    auto* block = block_of(storage);
    if (!is_capturing(current()) || !block || block->number > g_capture.load()->first_block) return;
    c10::Storage kept(c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(&storage));
    std::string content(static_cast<char*>(storage.mutable_data()), storage.nbytes());
    g_capture.load()->before.emplace(&storage, std::pair(kept, content));
  }
};

// libtorch_cpu's own kernels for collectives on CUDA. They call the group's NCCL backend, which simulated_cuda.py makes
// of gloo, so they are given views on the host.
std::unordered_map<c10::OperatorName, c10::SafeKernelFunction> g_collectives;

std::vector<IValue> on_host(const c10::OperatorHandle& op, const std::vector<IValue>& args, Operands& operands) {
  torch::jit::Stack stack;
  auto collective = g_collectives.find(op.operator_name());
  bool is_collective = collective != g_collectives.end();
  for (size_t i = 0; i < args.size(); ++i) {
    auto* alias = op.schema().arguments()[i].alias_info();
    stack.push_back(operands.host(args[i], is_collective || (alias && alias->isWrite())));
  }
  if (is_collective) collective->second.callBoxed(op, c10::DispatchKeySet(DispatchKey::CUDA), &stack);
  else op.redispatchBoxed(c10::DispatchKeySet(DispatchKey::CPU), &stack);
  return stack;
}

// gloo's promise is of the host's views of tensors; this one is of the tensors on the device. It waits for gloo at once,
// which is no wait for the device.
IValue arrived(const IValue& work, const IValue& outputs) {
  work.toCustomClass<c10d::Work>()->wait();
  std::vector<Tensor> tensors;
  each_tensor(outputs, [&](const Tensor& tensor) { return tensors.push_back(tensor), tensor; });
  auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::ofTensors());
  future->markCompleted(tensors);
  return c10d::Work::create_from_future(future);
}

// Why the host waits for an op's result; empty if it does not.
std::string reason_to_wait(const c10::OperatorHandle& op, const std::vector<IValue>& args) {
  auto& name = op.schema().name();
  bool last_unknown = !args.empty() && args.back().isNone();
  if (name == "aten::index" || name.rfind("aten::index_put", 0) == 0 || name == "aten::_index_put_impl_") {
    for (const IValue& index : args[1].toList()) {
      if (!index.isTensor() || !index.toTensor().defined()) continue;
      auto type = index.toTensor().scalar_type();
      if (type == at::kBool || type == at::kByte) return name + " by a mask";
      if (!index.toTensor().is_cuda()) return name + " by indices on the host";
    }
    return "";
  }
  if (op.hasTag(at::Tag::data_dependent_output)) return name;
  if (name == "aten::repeat_interleave") return last_unknown ? name : "";
  if (op.hasTag(at::Tag::dynamic_output_shape) && name.rfind("aten::", 0) == 0) return name;
  // FBGEMM's ops on jagged tensors take the size of their result as the last argument, or else compute and read it.
  if (!last_unknown || name.rfind("fbgemm::", 0)) return "";
  auto& last = op.schema().arguments().back();
  if (last.type()->isSubtypeOf(*c10::OptionalType::create(c10::IntType::get()))) return name + " without " + last.name();
  return "";
}

// Keeps an operand for replays, with the sizes of now; counts the references to memory from before the capture.
IValue keep(Graph& graph, const IValue& value) {
  return each_tensor(value, [&](const Tensor& tensor) {
    if (!tensor.is_cuda()) return tensor;
    auto* block = block_of(*tensor.storage().unsafeGetStorageImpl());
    if (block && block->number <= graph.first_block) ++graph.outside[tensor.storage().unsafeGetStorageImpl()];
    return view_of(tensor.storage(), DispatchKey::CUDA, tensor);
  });
}

void fallback(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  auto& schema = op.schema();
  auto& name = schema.name();
  std::vector<IValue> args(stack->end() - schema.arguments().size(), stack->end());
  // Kernels run on the device of their operands, whatever the current one is.
  c10::DeviceIndex device = -1, on_tensors = -1;
  bool two_devices = false;
  for (auto& arg : args) {
    if (arg.isDevice() && arg.toDevice().is_cuda()) device = Guard::index(arg.toDevice());
    each_tensor(arg, [&](const Tensor& tensor) {
      if (!tensor.is_cuda()) return tensor;
      two_devices |= on_tensors >= 0 && on_tensors != tensor.get_device();
      device = on_tensors = tensor.get_device();
      return tensor;
    });
  }
  c10::OptionalDeviceGuard guard;
  if (device >= 0) guard.reset_device({c10::kCUDA, device});
  auto waits = reason_to_wait(op, args);
  if (!waits.empty()) wait("sync", waits, clock_of(current()));
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    const at::Generator* generator = &default_generator(-1);
    for (auto& arg : args)
      if (arg.isGenerator()) draw(arg.toGenerator()), generator = nullptr;
    if (generator) draw(*generator);
  }
  Graph* graph = is_capturing(current()) ? g_capture.load() : nullptr;
  std::vector<IValue> kept;
  if (graph)
    for (auto& arg : args) kept.push_back(keep(*graph, arg));
  Operands operands;
  auto results = on_host(op, args, operands);
  bool mixes = name.rfind("aten::index", 0) == 0 || name == "aten::_index_put_impl_" || name.rfind("fbgemm::", 0) == 0;
  // torch takes the tensors of these op by op if they are on several devices.
  two_devices &= name.rfind("aten::_foreach", 0) != 0;
  TORCH_CHECK(!two_devices, "Expected all tensors to be on the same device, but found at least two devices: ", name);
  TORCH_CHECK(mixes || operands.on_host.empty() || operands.pairs.empty(),
              "Expected all tensors to be on the same device: ", name, " got cuda tensors and a cpu tensor of size ",
              operands.on_host);
  operands.resized();
  for (auto& result : results)
    if (result.isObject() && g_collectives.count(op.operator_name())) result = arrived(result, args[0]);
  for (auto& result : results)
    result = each_tensor(result, [&](const Tensor& tensor) { return operands.device(tensor); });
  launch(name.c_str(), {operands.touched.begin(), operands.touched.end()});
  if (graph && !(results.size() == 1 && results[0].isScalar())) {
    Call call{op, kept, {}};
    for (auto& result : results) call.outputs.push_back(keep(*graph, result));
    graph->calls.push_back(std::move(call));
    for (auto [block, written] : operands.touched) graph->touched[block] |= written;
  }
  stack->erase(stack->end() - schema.arguments().size(), stack->end());
  stack->insert(stack->end(), results.begin(), results.end());
}

void copy(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  auto args = torch::jit::last(*stack, 3);
  Tensor to = args[0].toTensor(), from = args[1].toTensor();
  bool non_blocking = args[2].toBool();
  if (to.is_cuda() && from.is_cuda()) {
    if (to.device() == from.device()) return fallback(op, keys, stack);
    // A copy between devices orders both streams.
    Locked lock(g_lock);
    auto stream = [](const Tensor& tensor) { return tensor.get_device() * 1000 + t_streams[tensor.get_device()]; };
    merge(g_clocks[stream(to)], g_clocks[stream(from)]);
    merge(g_clocks[stream(from)], g_clocks[stream(to)]);
  }
  c10::OptionalDeviceGuard guard(to.is_cuda() ? to.device() : from.device());
  at::AutoDispatchBelowADInplaceOrView below;
  Operands operands;
  auto host_to = operands.host(to, true), host_from = operands.host(from, false);
  launch("aten::copy_", {operands.touched.begin(), operands.touched.end()});
  auto& on_host = to.is_cuda() ? from : to;
  bool pinned = on_host.is_contiguous() && is_pinned(on_host.data_ptr());
  std::string what = to.is_cuda() ? "copy to the device" : "copy to the host";
  if (!pinned) what += to.is_cuda() ? " from pageable memory" : " in pageable memory";
  bool waits = !non_blocking || (!pinned && !to.is_cuda());
  if (on_host.is_cuda() || !to.numel()) waits = false;
  else if (waits) wait("sync", what, clock_of(current()));
  else {
    // A graph would read or write the host's memory again in each replay.
    forbid_in_capture(what);
    if (!pinned) tell("pageable", what);
  }
  if (waits || to.is_cuda()) {
    host_to.copy_(host_from);
  } else {
    auto values = host_from.clone();
    {
      Locked lock(g_lock);
      g_copies.push_back({current(), g_clocks[current()][current()], to, values});
    }
    if (to.is_floating_point()) to.fill_(std::numeric_limits<double>::quiet_NaN());
    else to.fill_(77);
  }
  torch::jit::drop(*stack, 3);
  stack->push_back(to);
}

using Dtype = std::optional<at::ScalarType>;
using Layout = std::optional<at::Layout>;
using MaybeDevice = std::optional<at::Device>;
const c10::DispatchKeySet kCuda(DispatchKey::CUDA);
Tensor empty(at::IntArrayRef size, Dtype dtype, Layout, MaybeDevice device, std::optional<bool> pin,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin.value_or(false), "Only dense CPU tensors can be pinned");
  c10::OptionalDeviceGuard guard(device);
  TORCH_CHECK(t_device < g_devices, "CUDA error: invalid device ordinal ", (int)t_device);
  return at::detail::empty_generic(size, &g_allocator, kCuda, c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, Dtype dtype, Layout, MaybeDevice device,
                     std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  TORCH_CHECK(t_device < g_devices, "CUDA error: invalid device ordinal ", (int)t_device);
  return at::detail::empty_strided_generic(size, stride, &g_allocator, kCuda, c10::dtype_or_default(dtype));
}
const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* storage = self.storage().unsafeGetStorageImpl();
  size_t bytes = (c10::multiply_integers(size) + self.storage_offset()) * self.itemsize();
  if (bytes > storage->nbytes()) {
    auto data = device_memory(bytes);
    if (storage->nbytes()) memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}
Tensor& set_storage(Tensor& self, c10::Storage source) {
  int64_t size = source.nbytes() / self.itemsize();
  return at::native::set_storage_cpu_(self, source, 0, {size}, {});
}
void record_stream(Tensor& self, c10::Stream stream) {
  Guard().recordDataPtrOnStream(self.storage().data_ptr(), stream);
}
// Of the fused attention kernels a CPU has others than a GPU; the plain one is the same.
int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                        std::optional<double>, bool) {
  return 0;
}

// ---------------------------------------------------------------- what device.py calls
void capture_begin(int64_t id, std::string mode) {
  Locked lock(g_lock);
  TORCH_CHECK(!g_capture, "CUDA error: a capture is under way");
  auto& graph = g_graphs[id];
  graph = Graph{std::move(mode), std::this_thread::get_id(), current(), g_blocks, {current()}};
  graph.random = default_generator(-1).get_state();
  static_cast<Generator*>(default_generator(-1).unsafeGetGeneratorImpl())->in_capture = true;
  g_capture = &graph;
}
void capture_end(int64_t id) {
  Locked lock(g_lock);
  auto& graph = g_graphs[id];
  auto origin = g_clocks[graph.origin];
  bool joined = true;
  for (auto stream : graph.streams) joined &= origin[stream] >= g_clocks[stream][stream];
  for (auto stream : graph.streams) merge(g_host, g_clocks[stream]);
  g_capture = nullptr;
  for (auto& [storage, saved] : graph.before) memcpy(storage->mutable_data(), saved.second.data(), saved.second.size());
  graph.before.clear();
  default_generator(graph.origin / 1000).unsafeGetGeneratorImpl()->set_state(*graph.random.unsafeGetTensorImpl());
  // As in torch, a capture that fails leaves the generator waiting for its end.
  TORCH_CHECK(!graph.broken, "CUDA error: operation failed due to a previous error during capture");
  static_cast<Generator*>(default_generator(graph.origin / 1000).unsafeGetGeneratorImpl())->in_capture = false;
  TORCH_CHECK(joined, "CUDA error: capturing stream has unjoined work");
}
void replay(int64_t id) {
  auto& graph = g_graphs.at(id);
  for (auto [storage, references] : graph.outside)
    TORCH_CHECK(c10::raw::intrusive_ptr::use_count(storage) > references,
                "a replay reads or writes memory that has been freed");
  at::NoGradGuard no_grad;
  at::AutoDispatchBelowADInplaceOrView below;
  for (auto& call : graph.calls) {
    Operands operands, into;
    auto results = on_host(call.op, call.args, operands);
    for (size_t i = 0; i < results.size(); ++i) {
      std::vector<Tensor> targets;
      each_tensor(call.outputs[i], [&](const Tensor& tensor) { return targets.push_back(tensor), tensor; });
      auto target = targets.begin();
      each_tensor(results[i], [&](const Tensor& value) {
        auto host = into.host(*target++, true);
        // Ops in place and views have written it already.
        if (host.data_ptr() != value.data_ptr() || host.strides() != value.strides()) host.copy_(value);
        return value;
      });
    }
  }
  launch("graph replay", {graph.touched.begin(), graph.touched.end()});
}
Tensor as_host(const Tensor& tensor) { return tensor.is_cuda() ? Operands().host(tensor, false) : tensor; }
Tensor as_device(const Tensor& tensor) { return Operands().device(tensor); }
void note(std::string name, std::vector<Tensor> read, std::vector<Tensor> written) {
  static std::set<std::string> names;
  Locked lock(g_lock);
  Touched touched;
  auto touch = [&](const Tensor& tensor, bool write) {
    if (auto* block = block_of(*tensor.storage().unsafeGetStorageImpl())) touched.emplace_back(block, write);
  };
  for (auto& tensor : read) touch(tensor, false);
  for (auto& tensor : written) touch(tensor, true);
  launch(names.insert(name).first->c_str(), touched);
}
}  // namespace simulated

namespace at {  // the registry of hooks is declared in here
struct CUDAHooks final : CUDAHooksInterface {
  explicit CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return simulated::g_devices; }
  int getNumGPUs() const override { return simulated::g_devices; }
  DeviceIndex current_device() const override { return simulated::t_device; }
  DeviceIndex getCurrentDevice() const override { return simulated::t_device; }
  void setCurrentDevice(DeviceIndex device) const override { simulated::t_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return simulated::Guard().exchangeDevice({kCUDA, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* data) const override { return simulated::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &simulated::g_pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &simulated::g_allocator; }
  Device getDeviceFromPtr(void*) const override { return {kCUDA, simulated::t_device}; }
  const Generator& getDefaultGenerator(DeviceIndex device) const override {
    return simulated::default_generator(device);
  }
  Generator getNewGenerator(DeviceIndex device) const override {
    auto index = device < 0 ? simulated::t_device : device;
    return make_generator<simulated::Generator>(index, at::detail::createCPUGenerator());
  }
  void deviceSynchronize(DeviceIndex device) const override { simulated::Guard().synchronizeDevice(device); }
};
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at

namespace {
using namespace simulated;
C10_REGISTER_GUARD_IMPL(CUDA, Guard);
TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&copy>());
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("record_stream", TORCH_FN(record_stream));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("_fused_sdp_choice", TORCH_FN(plain_attention));
}
TORCH_LIBRARY(simulated, m) {
  m.def("capture_begin", &capture_begin);
  m.def("capture_end", &capture_end);
  m.def("replay", &replay);
  m.def("as_host", &as_host);
  m.def("as_device", &as_device);
  m.def("note", &note);
  m.def("default_generator", [](int64_t device) -> at::Generator { return default_generator(device); });
}
}  // namespace

extern "C" {
void simulated_begin(int devices) {
  g_devices = devices;
  c10::SetAllocator(c10::kCUDA, &g_allocator);
  struct Silent final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  } silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);
  static torch::Library collectives(torch::Library::IMPL, "c10d", DispatchKey::CUDA, __FILE__, __LINE__);
  for (auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (name.name.rfind("c10d::", 0) || !op || !op->hasKernelForDispatchKey(DispatchKey::CUDA)) continue;
    g_collectives.emplace(name, op->getComputedKernelForDispatchKey(DispatchKey::CUDA));
    collectives.impl(name.name.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
  }
}
void simulated_listen(Listener listener) { g_listener = listener; }
void simulated_sync_debug_mode(int mode) { g_sync_debug_mode = mode; }
int simulated_is_capturing() { return is_capturing(current()); }
void simulated_forget(int64_t graph) {
  Graph gone;
  {
    Locked lock(g_lock);
    std::swap(gone, g_graphs[graph]);
    g_graphs.erase(graph);
  }
}
size_t simulated_bytes(int peak) { return peak ? g_peak : g_bytes; }
void simulated_reset_peak() { g_peak = g_bytes; }
}
