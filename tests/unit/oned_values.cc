// SPDX-License-Identifier: Apache-2.0
// What a C++ program that reads attributes as oned does makes of each text: a line of JSON for the unit tests.
//
//     g++ -std=c++17 -o oned_values oned_values.cc && ./oned_values > fixtures/oned_values.json
//
// A number is what `istringstream >> value` leaves at the end of the text; YES is compared without case, byte by byte.

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <strings.h>
#include <vector>

template <typename T>
static std::string number(const std::string& text)
{
    T value;
    std::istringstream in(text);
    in >> value;
    return text.empty() || in.fail() || !in.eof() ? "null" : std::to_string(value);
}

static std::string quoted(const std::string& text)
{
    std::string out = "\"";
    char hex[8];
    for (unsigned char c : text)
    {
        if (c < 0x20 || c == '"' || c == '\\')
        {
            std::snprintf(hex, sizeof hex, "\\u%04x", c);
            out += hex;
        }
        else
        {
            out += static_cast<char>(c);
        }
    }
    return out + "\"";
}

static void tell(const std::string& text)
{
    std::cout << "[" << quoted(text) << ", " << number<int>(text) << ", " << number<long long>(text) << ", "
              << (strcasecmp(text.c_str(), "YES") ? "false" : "true") << "]\n";
}

int main()
{
    const std::vector<std::string> cores = {
        "", "0", "7", "00", "007", "010", "08", "0x10", "0X1F", "1e3", "1.0", "1,000", "1_000", "0_9", "1 000", "1'000", "--1", "+-1",
        "12a", "a12", "1k", "1M", "1024", "2147483647", "2147483648", "4294967295", "4294967296", "4294967305", "9223372036854775807",
        "9223372036854775808", "18446744073709551615", "18446744073709551616", "99999999999999999999999999", "000000000000000000000000012",
        "\u0669", "\uff11", "\u00b2", "\u09e7\u09e8", "1\u00a0", "\u00a01", "\u20031", "0b1", "0o7", "inf", "nan", "NaN", "true", "NULL",
        "YES", "yes", "Yes", "yEs", "YE", "YES1", "Y", "NO", "no", "TRUE", "1", "ye\u017f", "YE\u017f", "\uff39\uff25\uff33", "on",
    };
    const std::vector<std::string> before = {"", " ", "\t", "\n", "\v", "\f", "\r", "+", "-", " -", "- ", "+ ", "\u00a0", "\ufeff", "\u2212"};
    const std::vector<std::string> after = {"", " ", "\n", "\t", "\r", ".", "_", "\u00a0", "\u200b"};
    for (const auto& core : cores)
    {
        for (const auto& first : before)
        {
            tell(first + core);
        }
        for (const auto& last : after)
        {
            tell(core + last);
        }
    }
}
