// What was called since the last virtual_gpu_clear, as lines of tab-separated fields: count, amount, event.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

#include "stand_in.h"

namespace {

// Made at the first call, which comes before constructors of this library have run.
struct Books {
    std::mutex mutex;
    Recorded recorded;
    std::unordered_map<const void*, const char*> names;
    long step = 0;
};

Books& books() {
    static Books* all = new Books;
    return *all;
}

using Observer = void (*)(const char* how);
Observer observer = nullptr;

std::string demangled(const char* name) {
    int status = 0;
    char* plain = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    std::string result = status == 0 ? plain : name;
    free(plain);
    return result;
}

void add_to(Recorded& recorded, const std::string& event, long count, double amount) {
    Tally& tally = recorded.events[event];
    tally.count += count;
    tally.amount += amount;
}

}  // namespace

void record(const std::string& event, double amount, const void* stream) {
    auto add = [&](Recorded& recorded) { add_to(recorded, event, 1, amount); };
    if (stream && captured(stream, add)) return;
    std::lock_guard<std::mutex> lock(books().mutex);
    add(books().recorded);
}

void name_function(const void* function, const char* mangled) {
    std::lock_guard<std::mutex> lock(books().mutex);
    books().names[function] = mangled;
}

void record_launch(const void* function, const void* stream) {
    auto add = [&](Recorded& recorded) { recorded.launches[function] += 1; };
    if (stream && captured(stream, add)) return;
    std::lock_guard<std::mutex> lock(books().mutex);
    add(books().recorded);
}

// All of it runs. The amount of a replay is what it launches in the host's place: kernels and products.
void record_graph(const Recorded& graph) {
    std::lock_guard<std::mutex> lock(books().mutex);
    long launched = 0;
    for (auto& [event, tally] : graph.events) {
        add_to(books().recorded, event, tally.count, tally.amount);
        if (event.compare(0, 7, "kernel\t") == 0 || event.compare(0, 8, "product\t") == 0) launched += tally.count;
    }
    for (auto& [function, count] : graph.launches) {
        books().recorded.launches[function] += count;
        launched += count;
    }
    add_to(books().recorded, "replay", 1, launched);
}

void record_wait(const char* how) {
    record(std::string("wait\t") + how);
    if (observer) observer(how);
}

long this_step() {
    std::lock_guard<std::mutex> lock(books().mutex);
    return books().step;
}

bool has_launched() {
    std::lock_guard<std::mutex> lock(books().mutex);
    return !books().recorded.launches.empty();
}

void record_copy(const char* how, size_t bytes, const void* stream) {
    record(std::string("copy\t") + how, double(bytes), stream);
}

EXPORT void virtual_gpu_clear() {
    std::lock_guard<std::mutex> lock(books().mutex);
    books().recorded = {};
    books().step += 1;
}

// Has somebody told of every wait, on the thread that waits.
EXPORT void virtual_gpu_observe(Observer told) { observer = told; }

// A kernel that Python stands in for.
EXPORT void virtual_gpu_kernel(const char* name) { record(std::string("kernel\t") + name, 0, captured_origin()); }

EXPORT int virtual_gpu_write(const char* path) {
    std::lock_guard<std::mutex> lock(books().mutex);
    FILE* file = fopen(path, "w");
    if (!file) return 1;
    for (auto& [event, tally] : books().recorded.events)
        fprintf(file, "%ld\t%.17g\t%s\n", tally.count, tally.amount, event.c_str());
    for (auto& [function, count] : books().recorded.launches) {
        auto found = books().names.find(function);
        std::string name = found == books().names.end() ? "unnamed" : demangled(found->second);
        fprintf(file, "%ld\t0\tkernel\t%s\n", count, name.c_str());
    }
    return fclose(file);
}

// Called by functions that this library does not have (harness/tools/rehearse/build.py makes them).
EXPORT void virtual_gpu_unknown(const char* name) {
    record(std::string("unknown\t") + name);
    fprintf(stderr, "virtual GPU: %s is not known, and fails\n", name);
}
