// Look-ups with Node's fetch as it comes: node look_ups.mjs URL < requests > answers.
import { createInterface } from "node:readline";

for await (const line of createInterface({ input: process.stdin })) {
  const [id, keys] = line.split("\t");
  const data = BigInt64Array.from(keys.split(" "), BigInt);
  const document = {
    ...(id === "-" ? {} : { id }),
    inputs: [{ name: "item_id", shape: [data.length], datatype: "INT64", parameters: { binary_data_size: data.byteLength } }],
    outputs: ["item_id", "item_id.found"].map((name) => ({ name, parameters: { binary_data: true } })),
  };
  const json = Buffer.from(JSON.stringify(document));
  const answer = await fetch(process.argv[2], {
    method: "POST",
    headers: { "Content-Type": "application/octet-stream", "Inference-Header-Content-Length": String(json.length) },
    body: Buffer.concat([json, Buffer.from(data.buffer)]),
  });
  const body = Buffer.from(await answer.arrayBuffer());
  if (!answer.ok) throw new Error(`${answer.status}: ${body}`);
  console.log(answer.headers.get("inference-header-content-length"), body.toString("base64"));
}
