#include "decoder.h"

#include "buffer.h"
#include "gated.h"
#include "pool.h"
#include "rows.h"

namespace {

using pool::for_rows;

// The activations of a step. A thread that runs models keeps one.
struct Workspace {
    Buffer residual, qkv, attention, normed, added, operand, scales;
    GatedRows gated;

    Operand operand_of(const Linear& linear, int64_t tokens) {
        int64_t stride = operand_stride(linear.format, linear.k);
        return {operand.bytes(stride * tokens), stride, scales.floats(tokens)};
    }
};

Workspace& workspace() {
    static thread_local Workspace workspace;
    return workspace;
}

template <class T>
const T* table_row(const char* table, int64_t index, int64_t width) {
    return reinterpret_cast<const T*>(table) + index * width;
}

void embed(const Model& model, const Step& step, float* out) {
    for_rows(step.tokens, model.hidden, [&](int64_t token) {
        int64_t id = step.input_ids[token], n = model.hidden;
        if (!model.embedding)
            unpack_row(model.head, id, out + token * n);
        else if (model.embedding_format == FLOAT32)
            copy_row(table_row<float>(model.embedding, id, n), n, out + token * n);
        else
            copy_row(table_row<Bf16>(model.embedding, id, n), n, out + token * n);
        if (model.embedding_scale != 1) scale_row(out + token * n, n, model.embedding_scale);
    });
    for (int64_t i = 0; i < step.replaced; i++)
        copy_row(step.embeddings + i * step.parts * model.hidden, model.hidden, out + step.places[i] * model.hidden);
}

// residual += the normalized rows of x.
void add_normed(const Model& model, const float* x, const float* norm, int64_t tokens, float* residual) {
    int64_t n = model.hidden;
    for_rows(tokens, n,
             [&](int64_t token) { add_rmsnorm_row(x + token * n, norm, n, model.eps, residual + token * n); });
}

// What a linear layer is given: rows in the format of its weights, and as floats for its adapters.
struct Inputs {
    Operand rows;
    const float* floats;
};

// Adapters that tokens of a step have, or null.
const Adapters* in_use(const Adapters* adapters, const Step& step) { return step.adapted ? adapters : nullptr; }

// out = x @ linear, and what adapters add to that.
void multiply(const Linear& linear, const Adapters* adapters, const Inputs& x, const Step& step, Output out) {
    if (!in_use(adapters, step)) return multiply(linear, x.rows, step.tokens, out);
    Addend addend = shrink(*adapters, *step.adapted, x.floats);
    out.addend = &addend;
    multiply(linear, x.rows, step.tokens, out);
}

// residual += x @ linear and what adapters add, normalized first where there is a norm.
void add(const Model& model, const Linear& linear, const Adapters* adapters, const Inputs& x, const float* norm,
         const Step& step, float* residual) {
    int64_t n = model.hidden;
    if (!norm) return multiply(linear, adapters, x, step, {Output::ADD, residual, n});
    float* added = workspace().added.floats(step.tokens * n);
    multiply(linear, adapters, x, step, {Output::STORE, added, n});
    add_normed(model, added, norm, step.tokens, residual);
}

// Normalized rows for a linear layer.
Inputs normed(const Model& model, const Linear& next, const Adapters* adapters, const float* x, const float* weight,
              const Step& step) {
    Operand operand = workspace().operand_of(next, step.tokens);
    float* floats = in_use(adapters, step) ? workspace().normed.floats(step.tokens * model.hidden) : nullptr;
    for_rows(step.tokens, model.hidden, [&](int64_t token) {
        static thread_local Buffer buffer;
        float* row = floats ? floats + token * model.hidden : buffer.floats(model.hidden);
        rmsnorm_row(x + token * model.hidden, weight, model.hidden, model.eps, row);
        fill_operand(next.format, row, model.hidden, operand, token);
    });
    return {operand, floats};
}

Operand operand_from(const Linear& next, const float* x, int64_t tokens) {
    Operand operand = workspace().operand_of(next, tokens);
    for_rows(tokens, next.k,
             [&](int64_t token) { fill_operand(next.format, x + token * next.k, next.k, operand, token); });
    return operand;
}

template <class T>
void store_token(const Cache& cache, int64_t slot, const float* k, const float* v) {
    int64_t size = cache.kv_heads * cache.head_dim;
    copy_row(k, size, reinterpret_cast<T*>(cache.k) + slot * size);
    copy_row(v, size, reinterpret_cast<T*>(cache.v) + slot * size);
}

// Norms of queries and keys, rotation, and new keys and values into the cache; `qkv` [tokens, all heads] in place.
void rotate_and_store(const Model& model, const Layer& layer, const Step& step, float* qkv, int64_t width) {
    const int64_t* slots = step.rows[layer.group].slot_mapping;
    for_rows(step.tokens, width, [&](int64_t token) {
        float* row = qkv + token * width;
        const float* table = layer.rope + step.positions[token] * model.rotary_dim;
        for (int64_t head = 0; head < model.heads + model.kv_heads; head++) {
            float* x = row + head * model.head_dim;
            const float* norm = head < model.heads ? layer.q_norm : layer.k_norm;
            if (norm) rmsnorm_row(x, norm, model.head_dim, model.eps, x);
            rotate_head(x, table, model.rotary_dim / 2, model.head_dim, x);
        }
        const float* k = row + model.heads * model.head_dim;
        const float* v = k + model.kv_heads * model.head_dim;
        if (layer.cache.format == FLOAT32)
            store_token<float>(layer.cache, slots[token], k, v);
        else
            store_token<Bf16>(layer.cache, slots[token], k, v);
    });
}

// Adds a layer's attention to the residual.
void add_attention(const Model& model, const Layer& layer, const Step& step, float* residual) {
    Workspace& space = workspace();
    int64_t width = layer.qkv.n, size = model.heads * model.head_dim;
    float *qkv = space.qkv.floats(step.tokens * width), *out = space.attention.floats(step.tokens * size);
    Inputs x = normed(model, layer.qkv, layer.qkv_adapters, residual, layer.input_norm, step);
    multiply(layer.qkv, layer.qkv_adapters, x, step, {Output::STORE, qkv, width});
    rotate_and_store(model, layer, step, qkv, width);
    Scoring scoring = {model.attention_scale, model.softcap, layer.window, layer.sinks};
    attend({qkv, width, layer.cache, step.rows[layer.group], scoring, model.heads, out, size});
    Inputs seen = {operand_from(layer.o, out, step.tokens), out};
    add(model, layer.o, layer.o_adapters, seen, layer.attention_norm, step, residual);
}

// Adds a layer's MLP to the residual.
void add_mlp(const Model& model, const Layer& layer, const Step& step, float* residual) {
    GatedRows& gated = workspace().gated;
    const Linear& down = layer.down;
    Inputs x = normed(model, layer.gate_up, layer.gate_up_adapters, residual, layer.post_norm, step);
    gated.begin(down.format, down.k, step.tokens, in_use(layer.down_adapters, step));
    multiply(layer.gate_up, layer.gate_up_adapters, x, step, gated.output(0, step.tokens, down.k, model.gate));
    add(model, down, layer.down_adapters, {gated.finish(), gated.floats()}, layer.mlp_norm, step, residual);
}

// Adds a layer's mixture to the residual, normalized first where there is a norm.
void add_experts(const Model& model, const Layer& layer, const Step& step, float* residual) {
    int64_t n = model.hidden;
    float* x = workspace().normed.floats(step.tokens * n);
    for_rows(step.tokens, n,
             [&](int64_t token) { rmsnorm_row(residual + token * n, layer.post_norm, n, model.eps, x + token * n); });
    if (!layer.mlp_norm) return add_mixture(*layer.mixture, x, step.tokens, residual);
    float* added = workspace().added.floats(step.tokens * n);
    std::memset(added, 0, size_t(step.tokens * n) * sizeof *added);
    add_mixture(*layer.mixture, x, step.tokens, added);
    add_normed(model, added, layer.mlp_norm, step.tokens, residual);
}

// Adds a further part of replaced embeddings to the residual of their tokens.
void add_part(const Model& model, const Step& step, int64_t part, float* residual) {
    for_rows(step.replaced, model.hidden, [&](int64_t i) {
        const float* given = step.embeddings + (i * step.parts + part) * model.hidden;
        float* row = residual + step.places[i] * model.hidden;
        for (int64_t j = 0; j < model.hidden; j++) row[j] += given[j];
    });
}

}  // namespace

const char* find_fault(const Rows& rows, const Cache& cache) {
    if (rows.query_start[0] != 0 || rows.query_start[rows.rows] != rows.tokens) return "rows do not make up the tokens";
    for (int64_t row = 0; row < rows.rows; row++) {
        int64_t count = rows.query_start[row + 1] - rows.query_start[row], length = rows.kv_lens[row];
        if (count < 0 || count > length) return "a row has more new tokens than tokens";
        int64_t pages = (length + cache.page_size - 1) / cache.page_size;
        if (pages > rows.page_stride) return "a row is longer than its page table";
        for (int64_t i = 0; i < pages; i++) {
            int32_t page = rows.page_table[row * rows.page_stride + i];
            if (page < 0 || page >= cache.pages) return "a page is not in the cache";
        }
    }
    for (int64_t row = 0; rows.seen && row < rows.rows; row++)
        for (int64_t token = rows.query_start[row]; token < rows.query_start[row + 1]; token++) {
            int64_t position = rows.kv_lens[row] - (rows.query_start[row + 1] - token);
            bool ascends = token == rows.query_start[row] || rows.seen[token] >= rows.seen[token - 1];
            if (rows.seen[token] <= position || rows.seen[token] > rows.kv_lens[row] || !ascends)
                return "a token sees tokens that its row does not have, or fewer than one before it";
        }
    for (int64_t token = 0; rows.slot_mapping && token < rows.tokens; token++)
        if (rows.slot_mapping[token] < 0 || rows.slot_mapping[token] >= cache.pages * cache.page_size)
            return "a slot is not in the cache";
    return nullptr;
}

const char* find_fault(const Model& model, const Step& step) {
    for (int64_t token = 0; token < step.tokens; token++) {
        if (step.input_ids[token] < 0 || step.input_ids[token] >= model.vocab)
            return "a token is not in the vocabulary";
        if (step.positions[token] < 0 || step.positions[token] >= model.positions) return "a position is past the last";
    }
    for (int64_t i = 0; i < step.replaced; i++)
        if (step.places[i] < 0 || step.places[i] >= step.tokens) return "an embedding is of no token";
    if (step.parts > model.layer_count + 1) return "embeddings have parts for more layers than there are";
    if (step.adapted)
        if (const char* fault = find_fault(*step.adapted, step.tokens)) return fault;
    for (int64_t group = 0; group < step.groups; group++) {
        if (step.rows[group].tokens != step.tokens) return "groups differ in tokens";
        for (int64_t i = 0; i < model.layer_count; i++)
            if (model.layers[i].group == group) {
                if (const char* fault = find_fault(step.rows[group], model.layers[i].cache)) return fault;
                break;
            }
    }
    return nullptr;
}

void forward(const Model& model, const Step& step, float* hidden) {
    float* residual = workspace().residual.floats(step.tokens * model.hidden);
    embed(model, step, residual);
    for (int64_t i = 0; i < model.layer_count; i++) {
        add_attention(model, model.layers[i], step, residual);
        (model.layers[i].mixture ? add_experts : add_mlp)(model, model.layers[i], step, residual);
        if (i + 1 < step.parts) add_part(model, step, i + 1, residual);
    }
    for_rows(step.tokens, model.hidden, [&](int64_t token) {
        const float* row = residual + token * model.hidden;
        rmsnorm_row(row, model.norm, model.hidden, model.eps, hidden + token * model.hidden);
    });
}

void linear(const Linear& linear, const float* x, int64_t m, float* out) {
    multiply(linear, operand_from(linear, x, m), m, {Output::STORE, out, linear.n});
}
