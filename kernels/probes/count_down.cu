#include "loop.cuh"

struct Params {
    u64 word;
    u64 condition;
};
SAME_LAYOUT(Params, 16, condition, 8);

// Takes one from a word that is not zero and repeats the loop; ends it once the word is zero.
extern "C" __global__ void count_down(const __grid_constant__ Params p) {
    if (blockIdx.x != 0 || threadIdx.x != 0) {
        return;
    }
    u64 *word = at<u64>(p.word);
    const bool again = *word != 0;
    if (again) {
        *word -= 1;
    }
    set_condition(p.condition, again);
}
