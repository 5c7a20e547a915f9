// Rings: how the ranks of one host pass messages through memory that all of them map. Knows nothing of torch.
//
// Each rank owns a ring. A collective is a number of frames that a rank writes into its own ring at the call, and that
// its peers read when they wait. So a call needs no thread and no system call, and the last rank to wait finds
// everything in place. The collectives of a group begin and end in the order of their calls.
#pragma once

#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace rings {

using Clock = std::chrono::steady_clock;
using std::to_string, std::chrono::milliseconds;

constexpr size_t kLine = 64;          // a cache line: no two ranks write to the same one
constexpr size_t kRing = 2 << 20;     // 8 MiB leave the cache: they took 1.3 times as long for 32 MB
constexpr size_t kFrame = 512 << 10;  // peers read one frame while the next is written
constexpr size_t kWarm = 256 << 10;   // an empty ring starts over past this, so that small messages stay in the cache
constexpr uint32_t kEveryone = UINT32_MAX, kNobody = UINT32_MAX - 1;
// A wait spins, unless others need the core, and then sleeps. It never calls sched_yield(): on a busy machine that gave
// the rest of the time slice away, and steps took twice as long as over gloo.
constexpr std::chrono::microseconds kGlance{2}, kSpin{500};
constexpr double kCrowded = 30;  // involuntary switches a second from which on a thread does not spin
constexpr milliseconds kNap{50}, kPoll{1}, kHelp{5};

inline size_t lined(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// What all ranks must pass alike to a collective.
struct Call { uint8_t kind = 0, type = 0, op = 0, root = 0; bool operator==(const Call&) const = default; };
struct Bytes { char* at = nullptr; size_t count = 0; };

// The shared memory: a Desk for each rank, a Mark for each pair, the rings. Zeros are a valid beginning. Its atomics
// are sequentially consistent: who goes to sleep says so and then looks, who publishes does so and then looks for
// sleepers, so that one of the two sees the other.
struct alignas(kLine) Desk {
  alignas(kLine) std::atomic<uint64_t> head;  // bytes of frames that this rank has published
  alignas(kLine) std::atomic<uint32_t> bell;  // futex, rung when something has changed for this rank
  std::atomic<uint32_t> sleepers;             // threads of this rank that wait for the bell
  std::atomic<uint32_t> short_of_room;        // those of them whose frames do not fit into the ring
};
struct alignas(kLine) Mark { std::atomic<uint64_t> read; };  // bytes of a sender's frames that a reader has done with
struct alignas(kLine) Frame {
  uint64_t number;  // of the collective within the group
  uint64_t next;    // where the sender's next frame begins
  uint64_t bytes;   // of the content, which follows
  uint32_t reader;  // a rank, kEveryone, or kNobody for the rest of a ring that starts over
  uint32_t frames;  // how many the sender has for this collective
  Call call;
};

// One collective, as one rank takes part in it.
struct Collective {
  enum State { kUnderWay, kDone, kFailed };

  Call call;
  std::vector<std::pair<uint32_t, Bytes>> shares;  // to send, by reader: one for everyone, one for each peer, or none
  uint32_t sender = kEveryone;                     // whom this rank reads: every peer, one rank, or kNobody
  std::vector<Bytes> places;     // by sender, where its bytes go; of a reduction, this rank's own is the result's
  const char* own = nullptr;     // of a reduction: this rank's own addend
  void (*reduce)(Bytes out, const std::vector<const char*>& addends, Call call) = nullptr;
  std::function<void()> finish;  // runs once everything has arrived, before anybody sees the end
  std::atomic<int> state{kUnderWay};
  std::string error;
  virtual ~Collective() = default;

 private:
  friend class Group;
  uint64_t number = 0;
  size_t piece = kFrame, offset = 0, turn = 0;  // the next frame is `piece` bytes of share `turn` from `offset` on
  uint32_t frames = 0, frames_out = 0;
  std::vector<uint32_t> frames_in, frames_due;  // by sender
  std::vector<size_t> bytes_in;
  std::function<void()> callback;
};
using CollectivePtr = std::shared_ptr<Collective>;

class Group;

// What a process has once: its groups, and a thread that ends collectives with callbacks, and moves those on that are
// too large for the rings while their rank computes.
class Helper {
 public:
  void add(const std::shared_ptr<Group>& group) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(groups_, [](auto& each) { return each.expired(); });
    groups_.push_back(group);
    if (!std::exchange(started_, true)) std::thread([this] { run(); }).detach();
  }
  // Wakes the thread: to end a collective, or to look after the groups for a while.
  void wake(std::shared_ptr<Group> group = nullptr, CollectivePtr collective = nullptr) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!group && looking_) return;
    queue_.emplace_back(std::move(group), std::move(collective));
    bell_.notify_one();
  }
  // Moves every group on but one, and returns whether there is any to move.
  bool progress(const Group* but = nullptr);

 private:
  void run();

  std::mutex mutex_;
  std::condition_variable bell_;
  std::deque<std::pair<std::shared_ptr<Group>, CollectivePtr>> queue_;
  std::vector<std::weak_ptr<Group>> groups_;
  bool started_ = false, looking_ = false;
};
inline Helper* helper = new Helper;  // never destroyed: its thread outlives static objects
// A fork has no such thread, and may have copied a mutex that is locked.
inline std::atomic<int> forks{0};
inline const int at_fork = pthread_atfork(nullptr, nullptr, [] { ++forks, helper = new Helper; });

// Whether others have pushed this thread off its core lately. To spin there takes time from the very peer it waits for.
inline bool crowded() {
  thread_local long switches = 0;
  thread_local Clock::time_point since{};
  thread_local double rate = 0;
  double seconds = std::chrono::duration<double>(Clock::now() - since).count();
  if (seconds > 0.001) {
    rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    rate = rate / 2 + (usage.ru_nivcsw - switches) / seconds / 2;
    switches = usage.ru_nivcsw;
    since = Clock::now();
  }
  return rate > kCrowded;
}

class Group : public std::enable_shared_from_this<Group> {
 public:
  // `memory` has memory_bytes(size) zeros at first; `pids` are the ranks' processes, empty where all are this one.
  Group(std::shared_ptr<char> memory, int rank, int size, std::vector<int> pids, milliseconds timeout,
        std::string (*describe)(Call))
      : rank(rank), size(size), timeout(timeout), describe_(describe), memory_(std::move(memory)),
        pids_(std::move(pids)), forks_(forks), cursor_(size), frames_(size), addends_(size) {
    desks_ = reinterpret_cast<Desk*>(memory_.get());
    marks_ = reinterpret_cast<Mark*>(desks_ + size);
    rings_ = reinterpret_cast<char*>(marks_ + size * size);
    // Before Linux 5.3 there is none: only the time-out tells of a dead peer then.
    for (int pid : pids_) pidfds_.push_back(int(syscall(SYS_pidfd_open, pid, 0)));
  }
  ~Group() { std::for_each(pidfds_.begin(), pidfds_.end(), close); }
  static size_t memory_bytes(int size) { return sizeof(Desk) * size + sizeof(Mark) * size * size + kRing * size; }

  // Begins a collective; returns why it cannot, or nothing.
  std::string issue(const CollectivePtr& collective) {
    Collective& c = *collective;
    if (forks_ != forks) return "this process was forked after the group was made, and cannot use it";
    if (c.shares.size() > 1) c.piece = std::max(kFrame / c.shares.size() / kLine, kLine) * kLine;
    size_t incoming = 0;
    for (auto& place : c.places) incoming += place.count;
    for (auto& [_, bytes] : c.shares) c.frames += (bytes.count + c.piece - 1) / c.piece;
    // Who has nothing to send takes part too, with an empty frame.
    if (!c.frames && !c.shares.empty()) c.frames = 1;
    c.frames_in.assign(size, 0);
    c.bytes_in.assign(size, 0);
    c.frames_due.assign(size, 1);  // the first one says how many there are
    std::unique_lock<std::mutex> lock(mutex_);
    if (!error_.empty()) return error_;
    c.number = ++number_;
    collectives_.push_back(collective);
    lock.unlock();
    progress();
    // Peers do not depend on when this rank waits, unless its frames, or theirs for it, may fill a ring.
    if (pending_ && (full_ || incoming > kFrame || pending_ > 16)) helper->wake();
    return "";
  }

  // Moves every collective of this group on as far as it goes without waiting.
  void progress() {
    // A fork may have copied the mutex locked.
    if (forks_ != forks) return;
    std::vector<CollectivePtr> ended;
    std::unique_lock<std::mutex> lock(mutex_);
    advance(ended);
    lock.unlock();
    for (auto& collective : ended)
      if (collective->callback) std::exchange(collective->callback, nullptr)();
  }

  // Returns once a collective has ended, which it does by the group's time-out, or by `limit` if that is not 0.
  void wait(const Collective& c, milliseconds limit = milliseconds(0)) {
    if (limit.count() <= 0) limit = timeout.load();
    auto start = Clock::now(), peers_seen = start;
    while (forks_ == forks) {
      progress();
      if (c.state != Collective::kUnderWay) return;
      auto waited = Clock::now() - start;
      if (waited < kGlance || (waited < kSpin && !crowded())) {
        for (int i = 0; i < 16; ++i) pause();
      } else if (waited > limit) {
        fail("timed out after " + to_string(limit.count()) + " ms");
      } else {
        sleep(c, std::min<Clock::duration>(kNap, limit - waited + milliseconds(1)));
        if (Clock::now() - peers_seen < 2 * kNap) continue;
        look_for_dead_peers();
        peers_seen = Clock::now();
      }
    }
  }

  // Calls back once a collective has ended, at once or by the helper; one callback a collective.
  void then(const CollectivePtr& collective, std::function<void()> callback) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (collective->state == Collective::kUnderWay) std::swap(collective->callback, callback);
    lock.unlock();
    if (callback) return callback();
    helper->wake(shared_from_this(), collective);
  }

  void fail(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    fail_locked(why);
  }
  bool pending() const { return pending_; }

  const int rank, size;
  std::atomic<milliseconds> timeout;

 private:
#if defined(__x86_64__)
  static void pause() { __builtin_ia32_pause(); }
#else
  static void pause() {}
#endif
  static void futex(std::atomic<uint32_t>& word, int operation, uint32_t value, const timespec* limit = nullptr) {
    syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), operation, value, limit, nullptr, 0);
  }
  static char* content(Frame* frame) { return reinterpret_cast<char*>(frame + 1); }
  Frame* frame(int sender, uint64_t at) { return reinterpret_cast<Frame*>(rings_ + kRing * sender + at % kRing); }
  std::atomic<uint64_t>& read(int sender, int reader) { return marks_[sender * size + reader].read; }
  bool owes(const Collective& c, uint32_t peer) const {
    return int(peer) != rank && (c.sender == kEveryone || c.sender == peer) && c.frames_in[peer] < c.frames_due[peer];
  }
  void ring(int peer) {
    desks_[peer].bell.fetch_add(1);
    futex(desks_[peer].bell, FUTEX_WAKE, INT32_MAX);
  }
  void ring_peers(std::atomic<uint32_t> Desk::*whom) {
    for (int peer = 0; peer < size; ++peer)
      if (peer != rank && (desks_[peer].*whom).load()) ring(peer);
  }

  void advance(std::vector<CollectivePtr>& ended) {
    wrote_ = came_ = false;
    bool full = false;
    // Frames go out in order, and ahead of what is still to come in.
    for (size_t i = 0; i < collectives_.size() && !full && error_.empty(); ++i) full = !write(*collectives_[i]);
    full_ = full;
    if (wrote_) ring_peers(&Desk::sleepers);
    while (!collectives_.empty()) {
      Collective& c = *collectives_.front();
      if (error_.empty()) {
        c.reduce ? read_sums(c) : read_copies(c);
        bool under_way = c.frames_out < c.frames;
        for (int peer = 0; peer < size; ++peer) under_way |= owes(c, peer);
        if (under_way && error_.empty()) break;
        if (error_.empty() && c.finish) c.finish();
        if (error_.empty()) c.state = Collective::kDone;
      }
      ended.push_back(std::move(collectives_.front()));
      collectives_.pop_front();
    }
    if (came_) ring_peers(&Desk::short_of_room);
    pending_ = collectives_.size();
    if (!ended.empty() && desks_[rank].sleepers.load()) ring(rank);
  }

  // Returns a place in the ring for a frame of `need` bytes, or nullptr where peers still read what is there.
  Frame* reserve(size_t need) {
    size_t at = head_ % kRing, rest = kRing - at;
    if (head_ + need - read_by_all_ > kRing || at >= kWarm) {
      read_by_all_ = UINT64_MAX;
      for (int peer = 0; peer < size; ++peer)
        if (peer != rank) read_by_all_ = std::min(read_by_all_, read(rank, peer).load());
    }
    size_t room = kRing - (head_ - read_by_all_);
    if ((need > rest || (at >= kWarm && room == kRing)) && rest + need <= room) {
      *frame(rank, head_) = Frame{0, head_ + rest, 0, kNobody, 0, {}};
      head_ += rest;
    } else if (need > rest || need > room) {
      return nullptr;
    }
    return frame(rank, head_);
  }

  // Writes what fits; returns whether everything is out.
  bool write(Collective& c) {
    for (; c.frames_out < c.frames; c.turn = (c.turn + 1) % c.shares.size(), c.offset += c.turn ? 0 : c.piece) {
      auto& [reader, bytes] = c.shares[c.turn];
      size_t length = bytes.count > c.offset ? std::min(bytes.count - c.offset, c.piece) : 0;
      // Where all shares are empty, the first round ends without their only frame.
      if (!length && !(c.offset && c.frames == 1)) continue;
      Frame* next = reserve(sizeof(Frame) + lined(length));
      if (!next) return false;
      *next = Frame{c.number, head_ + sizeof(Frame) + lined(length), length, reader, c.frames, c.call};
      if (length) std::memcpy(content(next), bytes.at + c.offset, length);
      head_ = next->next;
      desks_[rank].head = head_;
      ++c.frames_out;
      wrote_ = true;
    }
    return true;
  }

  // Returns a sender's next frame of `c` for this rank, or nullptr where none is there or all have been read.
  Frame* next(Collective& c, int sender) {
    while (error_.empty() && owes(c, sender) && cursor_[sender] < desks_[sender].head.load()) {
      Frame* frame = this->frame(sender, cursor_[sender]);
      if (frame->reader == kNobody) {
        move_on(sender, frame);
      } else if (frame->number != c.number || !(frame->call == c.call)) {
        fail_locked("rank " + to_string(sender) + " called " + describe_(frame->call) + " as its number " +
                    to_string(frame->number) + " (do all ranks take equally many batches?)");
      } else {
        c.frames_due[sender] = frame->frames;
        if (frame->reader == kEveryone || int(frame->reader) == rank) return frame;
        pass(c, sender, frame, 0);
      }
    }
    return nullptr;
  }
  void pass(Collective& c, int sender, Frame* frame, size_t bytes) {
    ++c.frames_in[sender];
    c.bytes_in[sender] += bytes;
    move_on(sender, frame);
  }
  void move_on(int sender, Frame* frame) { read(sender, rank) = cursor_[sender] = frame->next, came_ = true; }
  // Checks the size of a frame, so that ranks that pass other sizes are told.
  bool fits(int sender, Frame* frame, size_t least, size_t most) {
    if (frame->bytes >= least && frame->bytes <= most) return true;
    fail_locked("rank " + to_string(sender) + " sends " + to_string(frame->bytes) + " bytes where " +
                to_string(frame->bytes < least ? least : most) + " are to come");
    return false;
  }

  void read_copies(Collective& c) {
    for (int sender = 0; sender < size; ++sender) {
      while (Frame* frame = next(c, sender)) {
        size_t done = c.bytes_in[sender], left = c.places[sender].count - done;
        if (!fits(sender, frame, c.frames_in[sender] + 1 < c.frames_due[sender] ? 0 : left, left)) return;
        if (frame->bytes) std::memcpy(c.places[sender].at + done, content(frame), frame->bytes);
        pass(c, sender, frame, frame->bytes);
      }
    }
  }

  // Adds the frames in the order of the ranks, so that all ranks get the same bits.
  void read_sums(Collective& c) {
    size_t& done = c.bytes_in[rank];
    for (bool read = true; read;) {
      size_t length = std::min(c.places[rank].count - done, c.piece);
      // What is reduced in place must have been sent before.
      bool ready = c.frames_out == c.frames || c.offset > done;
      for (int sender = 0; sender < size; ++sender) {
        frames_[sender] = next(c, sender);
        if (frames_[sender] && !fits(sender, frames_[sender], length, length)) return;
        addends_[sender] = frames_[sender] ? content(frames_[sender]) : c.own + done;
        ready = ready && (frames_[sender] || sender == rank);
      }
      // After the last number only frames for others, and empty ones, are left to pass.
      if (length && !ready) return;
      if (length) c.reduce({c.places[rank].at + done, length}, addends_, c.call);
      done += length;
      read = false;
      for (int sender = 0; sender < size; ++sender)
        if (frames_[sender]) pass(c, sender, frames_[sender], length), read = true;
    }
  }

  void sleep(const Collective& c, Clock::duration limit) {
    // Two ranks may wait for two groups in opposite order.
    if (helper->progress(this)) limit = std::min<Clock::duration>(limit, kPoll);
    Desk& desk = desks_[rank];
    bool full = full_;
    desk.sleepers.fetch_add(1);
    desk.short_of_room.fetch_add(full);
    uint32_t bell = desk.bell.load();
    progress();
    timespec time{0, std::chrono::duration_cast<std::chrono::nanoseconds>(limit).count()};
    if (c.state == Collective::kUnderWay) futex(desk.bell, FUTEX_WAIT, bell, &time);
    desk.short_of_room.fetch_sub(full);
    desk.sleepers.fetch_sub(1);
  }

  void look_for_dead_peers() {
    for (int peer = 0; peer < int(pidfds_.size()); ++peer) {
      pollfd poller{pidfds_[peer], POLLIN, 0};
      if (poll(&poller, 1, 0) != 1) continue;
      // It may have sent everything before it ended.
      progress();
      std::lock_guard<std::mutex> lock(mutex_);
      if (!collectives_.empty() && (owes(*collectives_.front(), peer) || full_))
        fail_locked("rank " + to_string(peer) + " (process " + to_string(pids_[peer]) + ") has ended");
    }
  }

  void fail_locked(const std::string& why) {
    if (!error_.empty()) return;
    error_ = why + "; this is rank " + to_string(rank) + " of " + to_string(size);
    if (!collectives_.empty()) {
      Collective& c = *collectives_.front();
      error_ += " in number " + to_string(c.number) + ", " + describe_(c.call);
      for (int peer = 0, listed = 0; peer < size && listed < 4; ++peer)
        if (owes(c, peer)) error_ += (listed++ ? ", " : ", which waits for rank ") + to_string(peer);
    }
    for (auto& c : collectives_) c->error = error_, c->state = Collective::kFailed;
  }

  std::string (*const describe_)(Call);
  const std::shared_ptr<char> memory_;
  const std::vector<int> pids_;
  const int forks_;
  Desk* desks_;
  Mark* marks_;
  char* rings_;
  std::vector<int> pidfds_;
  std::atomic<size_t> pending_{0};
  std::atomic<bool> full_{false};  // frames of this rank wait for room in its ring
  std::mutex mutex_;               // guards what follows
  bool wrote_ = false, came_ = false;
  std::deque<CollectivePtr> collectives_;
  uint64_t number_ = 0, head_ = 0, read_by_all_ = 0;
  std::vector<uint64_t> cursor_;  // by sender
  std::vector<Frame*> frames_;
  std::vector<const char*> addends_;
  std::string error_;
};

inline bool Helper::progress(const Group* but) {
  std::vector<std::shared_ptr<Group>> busy;
  std::unique_lock<std::mutex> lock(mutex_);
  for (auto& each : groups_) {
    auto group = each.lock();
    if (group && group.get() != but && group->pending()) busy.push_back(std::move(group));
  }
  lock.unlock();
  for (auto& group : busy) group->progress();
  return !busy.empty();
}

inline void Helper::run() {
  pthread_setname_np(pthread_self(), "shared_memory");
  while (true) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto asked = [this] { return !queue_.empty(); };
    if (!looking_) bell_.wait(lock, asked);
    looking_ = true;
    // A rank that waits at once needs no help, so the first look is after a while.
    if (bell_.wait_for(lock, kHelp, asked)) {
      auto [group, collective] = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (group) group->wait(*collective);
    } else {
      looking_ = false;  // before the look: who begins something after it wakes this thread
      lock.unlock();
      bool busy = progress();
      lock.lock();
      looking_ |= busy;
    }
  }
}

}  // namespace rings
