// Reporter of node:test that writes the outcome of each test as a line of JSON.
export default async function* report(events) {
  const suites = [];
  for await (const { type, data } of events) {
    if (type === "test:start") suites[data.nesting] = data.name;
    if (type !== "test:pass" && type !== "test:fail") continue;
    if (data.details?.type === "suite" && type === "test:pass") continue;
    const file = (data.file ?? "").split("/").slice(-2).join("/");
    const test = [file, ...suites.slice(0, data.nesting), data.name].join("::");
    const status = data.skip !== undefined ? "skipped" : type === "test:pass" ? "passed" : "failed";
    const cause = data.details?.error?.cause ?? data.details?.error;
    if (status === "failed" && data.details?.error?.failureType === "subtestsFailed") continue;
    yield JSON.stringify({ test, status, message: String(cause?.message ?? cause ?? "").slice(-2000) }) + "\n";
  }
}
