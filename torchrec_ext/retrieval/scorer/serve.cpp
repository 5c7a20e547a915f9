// Scores items for users without Python, by the scores.pt2 beside this file and the bundle it was compiled from.
//
//   TORCH=$(python -c "import torch; print(torch.__path__[0])")
//   g++ -std=c++20 -O2 serve.cpp -o serve -I$TORCH/include -I$TORCH/include/torch/csrc/api/include \
//       -L$TORCH/lib -Wl,-rpath,$TORCH/lib -ltorch -ltorch_cpu -lc10
//   echo "7|12 31 8|0.5|1003 1004" | ./serve COMPILED BUNDLE
//
// A line of the input is a request: the columns of inputs.txt in order, then the ids of the items. Its answer is a line
// of scores, or "refused" if an item is unknown or a number too large.
#include <ATen/ATen.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <fstream>
#include <iostream>
#include <map>
#include <sstream>
#include <unordered_map>

const std::map<std::string, at::ScalarType> TYPES = {
    {"float32", at::kFloat}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}, {"int8", at::kChar}, {"int64", at::kLong}};

// Maps a tensor at an offset of a file; no row is read before a request asks for it.
at::Tensor mapped(const std::string& path, int64_t offset, at::ScalarType type, const std::vector<int64_t>& shape) {
  const int file = open(path.c_str(), O_RDONLY);
  struct stat status {};
  if (file < 0 || fstat(file, &status) < 0) throw std::runtime_error("cannot open " + path);
  char* start = static_cast<char*>(mmap(nullptr, status.st_size, PROT_READ, MAP_SHARED, file, 0));
  if (start == MAP_FAILED) throw std::runtime_error("cannot map " + path);
  return at::from_blob(start + offset, shape, type);
}

template <typename Number>
std::vector<Number> numbers(std::istream& line) {
  std::string field;
  std::getline(line, field, '|');
  std::istringstream words(field);
  return {std::istream_iterator<Number>(words), std::istream_iterator<Number>()};
}

// One column of a user: (1,), or a list (1, L) with -1 after its ids, because the code takes two or more.
at::Tensor column(std::istream& line, at::ScalarType type, bool is_list) {
  std::vector<double> values = numbers<double>(line);
  while (is_list && values.size() < 2) values.push_back(type == at::kLong ? -1 : 0);
  at::Tensor row = at::tensor(values, at::kDouble).to(type);
  return is_list ? row.unsqueeze(0) : row;
}

int main(int count, char** words) {
  if (count != 3) throw std::runtime_error("usage: serve COMPILED BUNDLE < requests");
  const std::string folder = words[1], bundle = words[2];
  std::vector<std::pair<at::ScalarType, bool>> columns;
  std::vector<at::Tensor> constants;
  std::unordered_map<int64_t, int64_t> positions;
  std::ifstream file(folder + "/inputs.txt");
  for (std::string text; std::getline(file, text);) {
    std::istringstream line(text);
    std::string kind, name, type;
    int64_t offset = 0;
    line >> kind >> name >> type >> offset;
    const std::vector<int64_t> shape{std::istream_iterator<int64_t>(line), std::istream_iterator<int64_t>()};
    if (kind == "column" || kind == "list") {
      columns.emplace_back(TYPES.at(type), kind == "list");
      continue;
    }
    const at::Tensor tensor = mapped(bundle + "/" + name, offset, TYPES.at(type), shape);
    if (kind == "constant") constants.push_back(tensor);
    for (int64_t row = 0; kind == "ids" && row < tensor.size(0); ++row) positions[tensor.data_ptr<int64_t>()[row]] = row;
  }
  torch::inductor::AOTIModelPackageLoader loader(folder + "/scores.pt2");
  std::cout.precision(9);
  for (std::string text; std::getline(std::cin, text);) {
    std::istringstream line(text);
    std::vector<at::Tensor> inputs;
    for (const auto& [type, is_list] : columns) inputs.push_back(column(line, type, is_list));
    std::vector<int64_t> items = numbers<int64_t>(line);
    const size_t asked = items.size();
    for (int64_t& item : items) item = positions.count(item) ? positions[item] : -1;
    while (!items.empty() && items.size() < 2) items.push_back(items[0]);
    inputs.push_back(at::tensor(items, at::kLong));
    inputs.insert(inputs.end(), constants.begin(), constants.end());
    const std::vector<at::Tensor> outputs = asked ? loader.run(inputs) : std::vector<at::Tensor>{};
    if (!asked || outputs[1].item<bool>()) std::cout << "refused";
    for (size_t item = 0; asked && !outputs[1].item<bool>() && item < asked; ++item)
      std::cout << (item ? " " : "") << outputs[0][item].item<float>();
    std::cout << std::endl;
  }
}
