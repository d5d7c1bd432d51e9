// What was called since the last virtual_gpu_clear, as lines of tab-separated fields: count, amount, event.
#include <cxxabi.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <unordered_map>

#include "stand_in.h"

namespace {

struct Tally {
    long count = 0;
    double amount = 0;
};

// Made at the first call, which comes before constructors of this library have run.
struct Books {
    std::mutex mutex;
    std::map<std::string, Tally> events;
    std::unordered_map<const void*, const char*> names;
    std::unordered_map<const void*, long> launches;
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

}  // namespace

void record(const std::string& event, double amount) {
    std::lock_guard<std::mutex> lock(books().mutex);
    Tally& tally = books().events[event];
    tally.count += 1;
    tally.amount += amount;
}

void name_function(const void* function, const char* mangled) {
    std::lock_guard<std::mutex> lock(books().mutex);
    books().names[function] = mangled;
}

void record_launch(const void* function) {
    std::lock_guard<std::mutex> lock(books().mutex);
    books().launches[function] += 1;
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
    return !books().launches.empty();
}

void record_copy(const char* how, size_t bytes) {
    record(std::string("copy\t") + how, double(bytes));
}

EXPORT void virtual_gpu_clear() {
    std::lock_guard<std::mutex> lock(books().mutex);
    books().events.clear();
    books().launches.clear();
    books().step += 1;
}

// Has somebody told of every wait, on the thread that waits.
EXPORT void virtual_gpu_observe(Observer told) { observer = told; }

// A kernel that Python stands in for.
EXPORT void virtual_gpu_kernel(const char* name) { record(std::string("kernel\t") + name); }

EXPORT int virtual_gpu_write(const char* path) {
    std::lock_guard<std::mutex> lock(books().mutex);
    FILE* file = fopen(path, "w");
    if (!file) return 1;
    for (auto& [event, tally] : books().events)
        fprintf(file, "%ld\t%.17g\t%s\n", tally.count, tally.amount, event.c_str());
    for (auto& [function, count] : books().launches) {
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
