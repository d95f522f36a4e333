// Unary calls with @grpc/grpc-js as it comes, all at once: node grpc_calls.mjs PACKAGES TARGET METHOD, a request in base64 a line, an answer a line.
import { createRequire } from "node:module";
import { createInterface } from "node:readline";

const [packages, target, method] = process.argv.slice(2);
const { Client, credentials } = createRequire(`${packages}/`)("@grpc/grpc-js");
const client = new Client(target, credentials.createInsecure(), { "grpc.max_receive_message_length": 1 << 28 });
const same = (bytes) => bytes;
const requests = [];
for await (const line of createInterface({ input: process.stdin })) requests.push(Buffer.from(line, "base64"));
const call = (request) =>
  new Promise((done) =>
    client.makeUnaryRequest(method, same, same, request, { deadline: Date.now() + 60_000 }, (error, answer) =>
      done(error ? `error ${error.message}` : answer.toString("base64")),
    ),
  );
for (const answer of await Promise.all(requests.map(call))) console.log(answer);
client.close();
