// Publishes one prompt to a run from JavaScript: node publish_prompt.mjs nats://127.0.0.1:4222 RUN STREAM ID 'the prompt'
// npm install nats @msgpack/msgpack hash-wasm          The token of the broker, if it wants one, is in NATS_TOKEN.
import { connect } from "nats";
import { encode } from "@msgpack/msgpack";
import { xxhash128 } from "hash-wasm";

const [url, run, stream, id, text] = process.argv.slice(2);
const token = (part) =>
  [...new TextEncoder().encode(part)]
    .map((b) => (/[A-Za-z0-9_-]/.test(String.fromCharCode(b)) ? String.fromCharCode(b) : "=" + b.toString(16).toUpperCase().padStart(2, "0")))
    .join("");
const bytes = new TextEncoder().encode(JSON.stringify(text));
const prompt = { store: "inline", id: await xxhash128(bytes), size_bytes: bytes.length, inline: bytes };
const message = encode({ stream, data_id: id, prompt, tags: ["js"] });

const nc = await connect({ servers: url, token: process.env.NATS_TOKEN });
const subject = `hr.${run}.prompt.published.${token(stream)}.${token(id)}`;
const options = { msgID: crypto.randomUUID(), expect: { lastSubjectSequence: 0 } };
console.log(JSON.stringify(await nc.jetstream().publish(subject, message, options)));
await nc.close();
