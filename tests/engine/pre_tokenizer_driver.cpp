// Cuts texts into words with the engine's own expressions, by the matcher and by std::regex, and compares.
//
// usage: driver EXPRESSIONS TEXTS. Both files are lists of blocks, each a length (4 bytes, little-endian) and as many bytes.
// EXPRESSIONS: one block a pre-tokenizer, its expressions separated by the byte 1. Prints how many cuts were compared; exit code 1
// and the first difference otherwise. Texts must be short: std::regex recurses for every character.

#include "unicode.h"

#include <cstdio>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" bool hg_switch_set(const char * name, const char * value); // ggml/include/hg.h

static std::vector<std::string> blocks(const char * path) {
    std::ifstream file(path, std::ios::binary);
    const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    std::vector<std::string> result;
    for (size_t at = 0; at + 4 <= all.size(); ) {
        uint32_t length = 0;
        for (int i = 0; i < 4; ++i) {
            length |= (uint32_t) (uint8_t) all[at + i] << 8*i;
        }
        result.push_back(all.substr(at + 4, length));
        at += 4 + length;
    }
    return result;
}

static std::vector<std::string> parts(const std::string & joined) {
    std::vector<std::string> result(1);
    for (const char c : joined) {
        if (c == 1) {
            result.emplace_back();
        } else {
            result.back() += c;
        }
    }
    return result;
}

static void show(const char * name, const std::vector<std::string> & words) {
    printf("%s:", name);
    for (const auto & word : words) {
        printf(" [");
        for (const char c : word) {
            printf("%02x", (unsigned) (uint8_t) c);
        }
        printf("]");
    }
    printf("\n");
}

int main(int argc, char ** argv) {
    if (argc != 3) {
        return 2;
    }
    const auto texts = blocks(argv[2]);
    size_t compared = 0, words = 0;
    for (const auto & joined : blocks(argv[1])) {
        const auto expressions = parts(joined);
        for (const auto & text : texts) {
            hg_switch_set("pre-tokenizer", "fast");
            const auto fast = unicode_regex_split(text, expressions, false);
            hg_switch_set("pre-tokenizer", "stock");
            const auto stock = unicode_regex_split(text, expressions, false);
            if (fast != stock) {
                printf("expressions: %s\n", joined.c_str());
                show("text",  {text});
                show("fast",  fast);
                show("stock", stock);
                return 1;
            }
            compared++;
            words += fast.size();
        }
    }
    printf("%zu cuts, %zu words\n", compared, words);
    return 0;
}
