// Trains a step written by onnx-remat with ONNX Runtime's C++ API:  ./train small.onnx state.safetensors [steps]
// Each output new.<name> is the next step's input <name>. CMakeLists.txt in this folder builds the program.
#include <onnxruntime_cxx_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <map>
#include <numeric>
#include <regex>
#include <stdexcept>
#include <string>
#include <vector>

using Bytes = std::vector<char>;

// The bytes of every tensor of a safetensors file: eight bytes with the length of a JSON header, the header, the data.
std::map<std::string, Bytes> read_state(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const Bytes all{std::istreambuf_iterator<char>(file), {}};
  if (all.size() < 8) throw std::runtime_error(std::string("cannot read ") + path);
  const auto start = 8 + *reinterpret_cast<const std::uint64_t*>(all.data());
  const std::string header(all.data() + 8, all.data() + start);
  const std::regex entry(R"re("([^"]+)":\s*\{[^{}]*"data_offsets":\s*\[(\d+),\s*(\d+)\])re");
  std::map<std::string, Bytes> state;
  for (std::sregex_iterator it(header.begin(), header.end(), entry), end; it != end; ++it) {
    const auto from = all.begin() + start + std::stoull((*it)[2]), to = all.begin() + start + std::stoull((*it)[3]);
    state[(*it)[1]] = Bytes(from, to);
  }
  return state;
}

std::vector<const char*> pointers(const std::vector<std::string>& names) {
  std::vector<const char*> found;
  for (const auto& name : names) found.push_back(name.c_str());
  return found;
}

void train(const char* model, const char* state_file, int steps) {
  Ort::Env env(ORT_LOGGING_LEVEL_WARNING, "train");
  Ort::SessionOptions options;
  options.DisableMemPattern();  // on by default, they would double the planned peak
  if (const char* threads = std::getenv("THREADS")) options.SetIntraOpNumThreads(std::atoi(threads));
  Ort::Session session(env, model, options);
  Ort::AllocatorWithDefaultOptions allocator;

  auto state = read_state(state_file);
  const auto cpu = Ort::MemoryInfo::CreateCpu(OrtArenaAllocator, OrtMemTypeDefault);
  std::vector<std::string> inputs, outputs;
  std::map<std::string, std::size_t> place;
  std::vector<Ort::Value> feeds;
  for (std::size_t i = 0; i < session.GetInputCount(); ++i) {
    inputs.emplace_back(session.GetInputNameAllocated(i, allocator).get());
    if (!state.count(inputs[i])) throw std::runtime_error("no value for the input " + inputs[i]);
    place[inputs[i]] = i;
    auto& bytes = state[inputs[i]];
    const auto type = session.GetInputTypeInfo(i);
    const auto about = type.GetTensorTypeAndShapeInfo();
    const auto shape = about.GetShape();
    feeds.push_back(Ort::Value::CreateTensor(
        cpu, bytes.data(), bytes.size(), shape.data(), shape.size(), about.GetElementType()));
  }
  for (std::size_t i = 0; i < session.GetOutputCount(); ++i)
    outputs.emplace_back(session.GetOutputNameAllocated(i, allocator).get());

  const auto input_names = pointers(inputs), output_names = pointers(outputs);
  for (int step = 0; step < steps; ++step) {
    auto made = session.Run(Ort::RunOptions{}, input_names.data(), feeds.data(), feeds.size(), output_names.data(),
                            output_names.size());
    for (std::size_t i = 0; i < outputs.size(); ++i) {
      if (outputs[i] == "loss") std::printf("step %d: loss %.9g\n", step, *made[i].GetTensorData<float>());
      if (outputs[i].rfind("new.", 0) != 0 || !place.count(outputs[i].substr(4))) continue;
      const auto renewed = outputs[i].substr(4);
      feeds[place[renewed]] = std::move(made[i]);
      state.erase(renewed);  // the first value's memory
    }
  }
}

int main(int count, char** arguments) {
  try {
    if (count < 3) throw std::runtime_error("usage: train small.onnx state.safetensors [steps]");
    train(arguments[1], arguments[2], count > 3 ? std::atoi(arguments[3]) : 20);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
