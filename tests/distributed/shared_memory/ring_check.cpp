// Ranks as threads of one process, which share one mapping, so that a sanitizer sees all that they do to each other:
// rounds of all collectives on two groups, of sizes about those of frames and rings, waited for in any order.
#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <random>
#include <thread>

#include "ring.h"

using rings::Bytes, rings::Collective, rings::Group;
using Number = int64_t;
using Numbers = std::vector<Number>;

struct Checked : Collective {
  std::vector<Numbers> inputs, outputs;
  std::function<bool()> right;
  std::atomic<bool> called{false};
};

void add(Bytes out, const std::vector<const char*>& addends) {
  for (size_t i = 0; i < out.count / sizeof(Number); ++i) {
    Number sum = 0;
    for (const char* addend : addends) sum += reinterpret_cast<const Number*>(addend)[i];
    reinterpret_cast<Number*>(out.at)[i] = sum;
  }
}
Bytes bytes(Numbers& numbers) { return {reinterpret_cast<char*>(numbers.data()), numbers.size() * sizeof(Number)}; }
bool all(const Numbers& numbers, Number value) {
  return std::all_of(numbers.begin(), numbers.end(), [value](Number each) { return each == value; });
}

// One collective of a kind as one rank takes part; `count(a, b)` are the numbers that rank a sends rank b.
std::shared_ptr<Checked> begin(Group& group, int kind, int round, const std::function<size_t(int, int)>& count) {
  auto c = std::make_shared<Checked>();
  int rank = group.rank, size = group.size, root = round % size;
  c->call = {char('0' + kind)};
  c->places.resize(size);
  c->inputs.resize(size);
  c->outputs.resize(size);
  if (kind == 0) {  // all_reduce in place
    Numbers& whole = c->inputs[0] = Numbers(count(0, 0), rank + round);
    c->sends = {bytes(whole)};
    c->places.assign(size, bytes(whole));
    c->reduce = add;
    c->right = [&whole, size, round] { return all(whole, size * (size - 1) / 2 + size * round); };
  } else if (kind == 1) {  // all_to_all, uneven
    for (int peer = 0; peer < size; ++peer) {
      c->inputs[peer] = Numbers(count(rank, peer), 100 * rank + peer);
      c->outputs[peer] = Numbers(count(peer, rank), -1);
      c->sends.push_back(bytes(c->inputs[peer]));
      c->places[peer] = bytes(c->outputs[peer]);
    }
    c->right = [c = c.get(), rank, size] {
      bool right = true;
      for (int peer = 0; peer < size; ++peer) right = right && all(c->outputs[peer], 100 * peer + rank);
      return right;
    };
  } else if (kind == 2) {  // broadcast
    Numbers& whole = c->inputs[0] = Numbers(count(0, 0), rank == root ? round : -1);
    c->call[1] = char('0' + root);
    c->sender = root;
    c->sends = {bytes(whole)};
    c->places[root] = bytes(whole);
    c->right = [&whole, round] { return all(whole, round); };
  } else if (kind == 3) {  // reduce_scatter
    for (int peer = 0; peer < size; ++peer) {
      c->inputs[peer] = Numbers(count(0, peer), rank + peer);
      c->sends.push_back(bytes(c->inputs[peer]));
    }
    c->outputs[0] = Numbers(count(0, rank), -1);
    c->places.assign(size, bytes(c->outputs[0]));
    c->reduce = add;
    c->right = [c = c.get(), rank, size] { return all(c->outputs[0], size * (size - 1) / 2 + size * rank); };
  } else {  // barrier
    c->sends.resize(1);
    c->right = [] { return true; };
  }
  return c;
}

void fail(const char* what, const std::string& why) {
  std::printf("%s: %s\n", what, why.c_str());
  std::exit(1);
}

int main(int count, char** arguments) {
  const int size = count > 1 ? std::atoi(arguments[1]) : 3, rounds = count > 2 ? std::atoi(arguments[2]) : 20;
  std::vector<std::vector<std::shared_ptr<Group>>> groups(size);
  for (int number = 0; number < 2; ++number) {
    size_t bytes = Group::memory_bytes(size);
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    std::shared_ptr<char> memory(static_cast<char*>(at), [bytes](char* start) { munmap(start, bytes); });
    for (int rank = 0; rank < size; ++rank) {
      auto group = std::make_shared<Group>(memory, rank, size, std::vector<int>(), std::chrono::milliseconds(60000));
      groups[rank].push_back(group);
      std::thread([group] { group->help(); }).detach();
    }
  }
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      std::mt19937 alike(7), own(rank);
      for (int round = 0; round < rounds; ++round) {
        std::vector<std::pair<Group*, std::shared_ptr<Checked>>> under_way;
        for (int i = 0; i < 6; ++i) {
          Group& group = *groups[rank][alike() % 2];
          int kind = int(alike() % 5);
          size_t unit = std::vector<size_t>{0, 1, 1000, 70'000, 400'000}[alike() % 5];
          auto c = begin(group, kind, round, [unit](int a, int b) { return unit * ((3 * a + 5 * b + 1) % 4); });
          std::string why = group.issue(c);
          if (!why.empty()) fail("issue", why);
          under_way.emplace_back(&group, c);
          if (alike() % 3 == 0) group.then(c, [each = c.get()] { each->called = true; });
          else c->called = true;
        }
        std::shuffle(under_way.begin(), under_way.end(), own);
        for (auto& [group, c] : under_way) {
          group->wait(*c);
          if (c->state != Collective::kDone) fail("wait", c->why);
          if (!c->right()) fail("wrong", c->call.data());
        }
        for (auto& [group, c] : under_way) {
          while (!c->called) std::this_thread::yield();
        }
      }
    });
  }
  for (auto& each : ranks) each.join();
  std::puts("right");
  std::fflush(stdout);
  _exit(0);  // the helpers never end
}
