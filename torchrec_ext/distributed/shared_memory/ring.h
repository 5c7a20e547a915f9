// Rings: how the ranks of one host pass messages through memory that all of them map. Knows nothing of torch.
//
// A collective moves in rounds: in each, a rank writes a slot of its ring, with the next piece for every peer, and then
// reads a slot of each peer that sends. It writes at the call, as far as there is room, and reads when it waits. So a
// call needs no thread and no system call. The collectives of a group begin and end in the order of their calls.
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace rings {

using Clock = std::chrono::steady_clock;
using std::to_string, std::chrono::milliseconds;

constexpr int kMostRanks = 64, kEveryone = -1;
constexpr size_t kLine = 64;            // bytes of a cache line
constexpr size_t kSlots = 16;           // of a ring
constexpr size_t kContent = 128 << 10;  // bytes of a slot: a ring of 2 MiB stays in the cache
constexpr milliseconds kNap{50}, kHelp{5};
constexpr std::chrono::microseconds kSpin{30};  // before a sleep, which costs as much
using Call = std::array<char, 48>;  // what all ranks must pass alike to a collective, in words
struct Bytes { char* at = nullptr; size_t count = 0; };

struct Slot {
  uint64_t number, rounds;     // of the collective within the group; of the sender in it
  Call call;
  uint64_t bytes[kMostRanks];  // by reader, in all rounds together
  char content[kContent];
};
// The shared memory has a desk for each rank, which alone writes to it, but for the bell. Zeros are a valid beginning.
// The atomics are sequentially consistent: who goes to sleep says so and then looks, who publishes does so and then
// looks for sleepers, so that one of the two sees the other.
struct alignas(kLine) Desk {
  std::atomic<uint64_t> head;                            // slots that this rank has published
  alignas(kLine) std::atomic<uint32_t> bell;             // futex, rung when something has changed for this rank
  std::atomic<uint32_t> sleepers;                        // threads of this rank that wait for the bell
  alignas(kLine) std::atomic<uint64_t> read[kMostRanks]; // slots that this rank has done with, by sender
  alignas(kLine) Slot slots[kSlots];
};

// One collective, as one rank takes part in it.
struct Collective {
  enum State { kUnderWay, kDone, kFailed };

  Call call{};
  int sender = kEveryone;     // who sends: every rank, or one
  std::vector<Bytes> sends;   // by reader, this rank included; one where all readers get the same
  std::vector<Bytes> places;  // by sender, where its bytes go; of a reduction, the result for each of them
  void (*reduce)(Bytes out, const std::vector<const char*>& addends) = nullptr;
  std::atomic<int> state{kUnderWay};
  std::string why;            // it has failed
  virtual ~Collective() = default;
  virtual void arrived() {}  // called once everything has arrived, before anybody sees the end

  bool has_sender(int rank) const { return sender == kEveryone || sender == rank; }
  const Bytes& to(int reader) const { return sends[seat(reader)]; }

 private:
  friend class Group;
  size_t seat(int reader) const { return sends.size() == 1 ? 0 : reader; }
  // A slot has a piece for each seat, or for all readers. Who sends nothing takes part too, with an empty one.
  size_t rounds(const Bytes& all) const { return std::max<size_t>(1, (all.count + piece - 1) / piece); }
  Bytes part(const Bytes& all, size_t round) const {
    size_t offset = std::min(round * piece, all.count);
    return {all.at + offset, std::min(piece, all.count - offset)};
  }

  uint64_t number = 0;
  size_t piece = 0, round = 0, written = 0, due_out = 0;  // rounds read and written, and how many to write
  std::vector<size_t> due_in;                             // how many to read, by sender
};
using CollectivePtr = std::shared_ptr<Collective>;

// A fork has none of its process' threads, and may have copied a mutex that is locked.
inline std::atomic<int> forks{0};
inline const int at_fork = pthread_atfork(nullptr, nullptr, [] { ++forks; });

class Group {
 public:
  // `memory` has memory_bytes(size) zeros at first; `pids` are the ranks' processes, empty where all are this one.
  Group(std::shared_ptr<char> memory, int rank, int size, std::vector<int> pids, milliseconds timeout)
      : rank(rank), size(size), timeout(timeout), memory_(memory), desks_(reinterpret_cast<Desk*>(memory.get())),
        pids_(pids), forks_(forks), cursor_(size), addends_(size) {
    // Before Linux 5.3 there is none: only the time-out tells of a dead peer then.
    for (int pid : pids_) pidfds_.push_back(int(syscall(SYS_pidfd_open, pid, 0)));
  }
  ~Group() { std::for_each(pidfds_.begin(), pidfds_.end(), ::close); }
  void close() { if (forks_ == forks) ask([this] { closed_ = true; }); }
  static size_t memory_bytes(int size) { return sizeof(Desk) * size; }

  // Begins a collective; returns why it cannot, or nothing.
  std::string issue(const CollectivePtr& collective) {
    Collective& c = *collective;
    if (forks_ != forks) return "this process was forked after the group was made, and cannot use it";
    c.piece = kContent / c.sends.size() / kLine * kLine;
    size_t incoming = 0;
    for (int peer = 0; peer < size; ++peer) {
      if (c.has_sender(rank)) c.due_out = std::max(c.due_out, c.rounds(c.to(peer)));
      // A sender's first slot says how many there are.
      c.due_in.push_back(peer != rank && c.has_sender(peer));
      incoming = std::max(incoming, c.rounds(c.places[peer]));
    }
    const Bytes &own = c.to(rank), &place = c.places[rank];
    if (c.has_sender(rank) && own.count != place.count) return "this rank sends itself another size than it expects";
    if (place.count && own.at != place.at && !c.reduce) std::memcpy(place.at, own.at, place.count);
    std::unique_lock<std::recursive_mutex> lock(mutex_);
    if (!error_.empty()) return error_;
    c.number = ++number_;
    collectives_.push_back(collective);
    lock.unlock();
    progress();
    // Peers do not depend on when this rank waits, unless its slots, or theirs for it, may fill a ring.
    if (pending_ && (full_ || incoming > kSlots / 4 || pending_ > kSlots / 2)) ask([this] { looks_ = true; });
    return "";
  }

  // Moves every collective of this group on as far as it goes without waiting.
  void progress() {
    // A fork may have copied the mutex locked.
    if (forks_ != forks) return;
    std::vector<CollectivePtr> ended;  // destroyed without the lock: a tensor may ask Python for its own
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    bool full = news_ = false;
    // Slots go out in order, and ahead of what is still to come in.
    for (size_t i = 0; i < collectives_.size() && !full && error_.empty(); ++i) full = !write(*collectives_[i]);
    full_ = full;
    while (!collectives_.empty()) {
      Collective& c = *collectives_.front();
      bool arrived = error_.empty() && read(c) && c.written == c.due_out;
      if (!arrived && error_.empty()) break;
      if (arrived) c.arrived(), c.state = Collective::kDone;
      ended.push_back(std::move(collectives_.front()));
      collectives_.pop_front();
    }
    pending_ = collectives_.size();
    if (!news_ && ended.empty()) return;
    for (Desk* desk = desks_; desk < desks_ + size; ++desk) {  // this rank's too: a thread may wait
      if (!desk->sleepers.load()) continue;
      desk->bell.fetch_add(1);
      futex(desk->bell, FUTEX_WAKE, INT32_MAX);
    }
  }

  // Returns once a collective has ended, which it does by the group's time-out, or by `limit` if that is not 0.
  void wait(const Collective& c, milliseconds limit = milliseconds(0)) {
    if (limit.count() <= 0) limit = timeout.load();
    auto start = Clock::now();
    Desk& desk = desks_[rank];
    timespec nap{0, std::chrono::nanoseconds(kNap).count()};
    while (forks_ == forks) {
      progress();
      if (c.state != Collective::kUnderWay) return;
      if (Clock::now() - start < kSpin) continue;
      if (Clock::now() - start > limit) fail("timed out after " + to_string(limit.count()) + " ms");
      desk.sleepers.fetch_add(1);
      uint32_t bell = desk.bell.load();
      progress();
      bool quiet = c.state == Collective::kUnderWay && futex(desk.bell, FUTEX_WAIT, bell, &nap) && errno == ETIMEDOUT;
      desk.sleepers.fetch_sub(1);
      if (quiet) look_for_dead_peers();
    }
  }

  // Calls back once a collective has ended, at once or by the helper.
  void then(const CollectivePtr& collective, std::function<void()> callback) {
    if (collective->state != Collective::kUnderWay) return callback();
    ask([&] { asked_.emplace_back(collective, std::move(callback)); });
  }

  // Runs in a thread until close(): ends collectives with callbacks, and moves those on that are too large for the
  // rings while their rank computes, or waits for another group.
  void help() {
    pthread_setname_np(pthread_self(), "shared_memory");
    std::unique_lock<std::mutex> lock(helper_mutex_);
    auto is_asked = [this] { return closed_ || !asked_.empty(); };
    while (!closed_ || !asked_.empty()) {
      helper_bell_.wait(lock, [&] { return looks_ || is_asked(); });
      // A rank that waits at once needs no help, so the first look is after a while.
      if (!helper_bell_.wait_for(lock, kHelp, is_asked)) {
        lock.unlock();
        progress();
        lock.lock();
      } else if (!asked_.empty()) {
        auto next = std::move(asked_.front());
        asked_.pop_front();
        lock.unlock();
        wait(*next.first);
        next.second();
        next = {};  // without the lock, as above
        lock.lock();
      }
      looks_ = pending_;
    }
  }

  void fail(const std::string& why) {
    std::lock_guard<std::recursive_mutex> lock(mutex_);
    if (!error_.empty()) return;
    error_ = why + "; this is rank " + to_string(rank) + " of " + to_string(size);
    if (!collectives_.empty()) {
      Collective& c = *collectives_.front();
      error_ += " in number " + to_string(c.number) + ", " + c.call.data();
      for (int peer = 0, listed = 0; peer < size && listed < 4; ++peer)
        if (owes(c, peer)) error_ += (listed++ ? ", " : ", which waits for rank ") + to_string(peer);
    }
    for (auto& c : collectives_) c->why = error_, c->state = Collective::kFailed;
  }

  const int rank, size;
  std::atomic<milliseconds> timeout;

 private:
  static long futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit = nullptr) {
    return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
  }
  Slot& next(int sender) { return desks_[sender].slots[cursor_[sender] % kSlots]; }
  static bool owes(const Collective& c, int peer) { return c.round < c.due_in[peer]; }

  // Writes what fits; returns whether everything is out.
  bool write(Collective& c) {
    for (; c.written < c.due_out; ++c.written, news_ = true) {
      for (int peer = 0; peer < size; ++peer)
        if (peer != rank && head_ - desks_[peer].read[rank].load() == kSlots) return false;
      Slot& slot = desks_[rank].slots[head_ % kSlots];
      slot.number = c.number, slot.rounds = c.due_out, slot.call = c.call;
      for (int peer = 0; peer < size; ++peer) slot.bytes[peer] = c.to(peer).count;
      for (size_t seat = 0; seat < c.sends.size(); ++seat) {
        Bytes next = c.part(c.sends[seat], c.written);
        if (next.count && (c.sends.size() == 1 || int(seat) != rank))
          std::memcpy(slot.content + seat * c.piece, next.at, next.count);
      }
      desks_[rank].head = ++head_;
    }
    return true;
  }

  // Reads the rounds that have come from all senders, in the order of the ranks, so that all ranks get the same bits of
  // a sum; returns whether there are no more.
  bool read(Collective& c) {
    for (; c.round < *std::max_element(c.due_in.begin(), c.due_in.end()); ++c.round) {
      for (int sender = 0; sender < size; ++sender) {
        if (owes(c, sender) && !has_come(c, sender)) return false;
        addends_[sender] = next(sender).content + c.seat(rank) * c.piece;
      }
      // What is reduced in place must have been sent before.
      if (c.reduce && c.written < std::min(c.due_out, c.round + 1)) return false;
      addends_[rank] = c.part(c.to(rank), c.round).at;
      if (c.reduce) c.reduce(c.part(c.places[rank], c.round), addends_);
      for (int sender = 0; sender < size; ++sender) {
        if (!owes(c, sender)) continue;
        Bytes place = c.part(c.places[sender], c.round);
        if (place.count && !c.reduce) std::memcpy(place.at, addends_[sender], place.count);
        desks_[rank].read[sender] = ++cursor_[sender];
        news_ |= desks_[sender].head.load() - cursor_[sender] == kSlots - 1;
      }
    }
    return true;
  }

  // Whether a sender's next slot is there; one of another collective, or of another size, fails the group.
  bool has_come(Collective& c, int sender) {
    if (!error_.empty() || cursor_[sender] == desks_[sender].head.load()) return false;
    Slot& slot = next(sender);
    std::string who = "rank " + to_string(sender);
    if (slot.number != c.number || slot.call != c.call)
      fail(who + " called " + slot.call.data() + " as its number " + to_string(slot.number) +
           " (do all ranks take equally many batches?)");
    else if (slot.bytes[rank] != c.places[sender].count)
      fail(who + " sends " + to_string(slot.bytes[rank]) + " bytes where " + to_string(c.places[sender].count) +
           " are to come");
    c.due_in[sender] = slot.rounds;
    return error_.empty();
  }

  void ask(const std::function<void()>& change) {
    std::lock_guard<std::mutex> lock(helper_mutex_);
    change(), helper_bell_.notify_one();
  }

  void look_for_dead_peers() {
    for (int peer = 0; peer < int(pidfds_.size()); ++peer) {
      pollfd poller{pidfds_[peer], POLLIN, 0};
      if (poll(&poller, 1, 0) != 1) continue;
      // It may have sent everything before it ended.
      progress();
      std::lock_guard<std::recursive_mutex> lock(mutex_);
      if (!collectives_.empty() && (owes(*collectives_.front(), peer) || full_))
        fail("rank " + to_string(peer) + " (process " + to_string(pids_[peer]) + ") has ended");
    }
  }

  const std::shared_ptr<char> memory_;
  Desk* const desks_;
  const std::vector<int> pids_;
  const int forks_;
  std::vector<int> pidfds_;
  std::atomic<size_t> pending_{0};
  std::atomic<bool> full_{false};  // slots of this rank wait for room in its ring
  std::recursive_mutex mutex_;     // guards what follows
  bool news_ = false;              // a new slot, or room for a sender whose ring was full
  std::deque<CollectivePtr> collectives_;
  uint64_t number_ = 0, head_ = 0;
  std::vector<uint64_t> cursor_;  // by sender
  std::vector<const char*> addends_;
  std::string error_;
  std::condition_variable helper_bell_;
  std::mutex helper_mutex_;  // guards what follows
  std::deque<std::pair<CollectivePtr, std::function<void()>>> asked_;
  bool looks_ = false, closed_ = false;
};

}  // namespace rings
