// The runtime model of common.planner, for even hosts: the same recurrences, tested to be equal. Times are in ms;
// matrices are [buckets][workers or hosts].
const milliseconds = (megabytes, gbps) => (8 * megabytes) / gbps;
const maxima = (one, other) => one.map((value, i) => Math.max(value, other[i]));
const range = (n) => Array.from({ length: n }, (_, i) => i);
const NONE = [];

function clusterOf({ hosts, per_host: L, mbit, delay, million, compute, jitter }) {
  const fields = DATA.planner.cluster, workers = hosts * L, payload = 4 * million;
  const most = Math.min(32, Math.max(4, Math.floor(2 ** 14 / workers)));
  const buckets = Math.min(most, Math.ceil(payload / fields.gossip_bucket_mb));
  return { ...fields, hosts, L, workers, payload, buckets, gbps: mbit / 1000, latency_us: 1000 * delay,
    latency: 1000 * delay / 1000,
    bucket: payload / buckets,
    inner: fields.intra_latency_us / 1000, computing: range(DATA.planner.steps).map((step) => range(workers)
      .map((i) => compute * Math.exp(jitter * DATA.planner.normal[i][step] - jitter ** 2 / 2))) };
}

// Sums are taken as links.py takes them: of messages that are ready at the same time rounding decides which is first.
function queue(ready, durations) { // when buckets leave queues that serve one after another
  const latest = durations.map(() => -Infinity);
  return ready.map((row, b) => row.map((at, e) => {
    latest[e] = Math.max(latest[e], at - b * durations[e]);
    return latest[e] + (b + 1) * durations[e];
  }));
}

const width = (values) => values.reduce((a, b) => Math.max(a, b)) - values.reduce((a, b) => Math.min(a, b));

// Send messages through queues that work on one at a time, in the order in which each edge alone would send them.
// A message is {turn, ready, duration, queue, end}; `before` has those of earlier steps.
function serve(ready, durations, nodes, before, shared) {
  const end = queue(ready, durations), start = end.map((row) => row.map((at, e) => at - durations[e]));
  const alone = new Set(nodes).size === nodes.length && !before.length;
  if (alone && !shared) return [start, end, NONE];
  const every = start.flatMap((row, b) => row.map((turn, e) => ({ turn, ready: alone ? turn : ready[b][e],
    duration: durations[e], queue: nodes[e], end: end[b][e] }))).concat(before.map((message) => ({ ...message })));
  if (alone) return [start, end, every];
  const lane = width(every.map((message) => message.turn)) + 1, key = (message) => message.queue * lane + message.turn;
  const order = [...every].sort((one, other) => key(one) - key(other));
  let total = 0, head = -1, first = 0, latest = -Infinity;
  const places = order.map((message, k) => { // which queue, what it has sent until then, and how late the message is
    total += message.duration;
    const sent = total - message.duration;
    if (!k || order[k - 1].queue !== message.queue) [head, first] = [head + 1, sent];
    return [head, sent - first, message.ready - (sent - first)];
  });
  const apart = width(places.map(([, , slack]) => slack)) + 1;
  order.forEach((message, k) => {
    const [place, sent, slack] = places[k], lift = place * apart;
    latest = Math.max(latest, slack + lift);
    message.ready = latest - lift + sent;
    message.end = message.ready + message.duration;
  });
  const of = (field) => ready.map((row, b) => row.map((_, e) => every[b * nodes.length + e][field]));
  const begun = of("ready");
  return [begun, begun.map((row) => row.map((at, e) => at + durations[e])), every];
}

class Edges { // point-to-point messages between agents, which occupy the queues of their two ends
  constructor(edges, queues, duration, latency, shared) {
    Object.assign(this, { edges, queues, latency, shared, durations: edges.map(() => duration) });
  }

  send(launched, busy, sent = NONE, received = NONE) {
    const least = Math.min(...launched.map((row) => Math.min(...row)));
    [sent, received] = [sent, received].map((messages) => messages.filter((message) => message.end > least));
    if (!this.edges.length) return [launched, sent, received];
    const begin = launched.map((row) => maxima(row, busy));
    const ready = begin.map((row) => this.edges.map(([from, to]) => Math.max(row[from], row[to])));
    const [start, left, sending] = serve(ready, this.durations, this.queues.map(([from]) => from), sent, this.shared);
    const [, came, receiving] = serve(start, this.durations, this.queues.map(([, to]) => to), received, this.shared);
    const done = launched.map((row) => [...row]);
    done.forEach((row, b) => this.edges.forEach(([from, to], e) => {
      const arrived = Math.max(came[b][e], left[b][e]);
      row[from] = Math.max(row[from], arrived);
      row[to] = Math.max(row[to], arrived + this.latency);
    }));
    return [done, sending, receiving];
  }

  last(done, busy) {
    const agents = new Set(this.edges.flat());
    return busy.map((at, i) => (agents.has(i) ? Math.max(at, ...done.map((row) => row[i])) : at));
  }
}

// A round is a function of (launched, busy) that returns when each worker is done with each bucket. busy: until when
// earlier messages occupy links, {across, inside, sent, received}.

function edgesOf(round) {
  if (round.offsets) {
    return range(round.agents).flatMap((i) => round.offsets.map((o) => (i + o) % round.agents).sort((a, b) => a - b)
      .map((j) => [i, j]));
  }
  return range(round.edges.length / 2).map((e) => [round.edges[2 * e], round.edges[2 * e + 1]]);
}

function roundTime(cluster, round) {
  if (round.kind === "idle") return (launched) => launched;
  if (round.kind === "hierarchical") return hierarchical(cluster, betweenHosts(cluster, round));
  if (round.kind === "subgroup") return inGroups(cluster, round.groups, round.leaving);
  const host = (i) => Math.floor(i / cluster.L), edges = edgesOf(round), crosses = ([i, j]) => host(i) !== host(j);
  const crossing = edges.filter(crosses), within = edges.filter((edge) => !crosses(edge));
  const across = new Edges(crossing, crossing.map((edge) => edge.map(host)),
    milliseconds(cluster.bucket, cluster.gbps), cluster.latency, cluster.L > 1);
  const inside = new Edges(within, within, milliseconds(cluster.bucket, cluster.intra_gbps), cluster.inner, false);
  return (launched, busy) => {
    const [outer, sent, received] = across.send(launched, busy.across, busy.sent, busy.received);
    const [inner] = inside.send(launched, busy.inside);
    Object.assign(busy, { sent, received, across: across.last(outer, busy.across),
      inside: inside.last(inner, busy.inside) });
    return outer.map((row, b) => maxima(row, inner[b]));
  };
}

function inGroups(cluster, groups, leaving) { // ring all-reduces in disjoint groups of workers
  const link = leaving.map((share) => milliseconds(share * cluster.bucket, cluster.gbps)),
    through = Array(cluster.workers).fill(false);
  const times = groups.map((members) => {
    const hosts = [...new Set(members.map((i) => Math.floor(i / cluster.L)))], g = members.length,
      crosses = hosts.length > 1;
    if (crosses) for (const i of members) through[i] = true;
    const inside = g > hosts.length ? milliseconds(2 * (g - 1) / g * cluster.bucket, cluster.intra_gbps) : 0;
    return [Math.max(inside, crosses ? Math.max(...hosts.map((h) => link[h])) : 0),
      2 * (g - 1) * (crosses ? cluster.latency_us : cluster.intra_latency_us) / 1000];
  });
  const mean = meanOfGroups(groups, times.map(([duration]) => duration), times.map(([, latency]) => latency));
  return (launched, busy) => {
    const done = mean(launched, busy.across.map((at, i) => (through[i] ? at : busy.inside[i]))),
      last = done.reduce(maxima);
    busy.across = busy.across.map((at, i) => (through[i] ? Math.max(at, last[i]) : at));
    busy.inside = busy.inside.map((at, i) => (through[i] ? at : Math.max(at, last[i])));
    return done;
  };
}

function meanOfGroups(groups, durations, latencies) {
  return (launched, busy) => {
    const ready = launched.map((row) => groups.map((members) =>
      Math.max(...members.map((i) => Math.max(row[i], busy[i])))));
    const done = launched.map((row) => [...row]);
    queue(ready, durations).forEach((row, b) => groups.forEach((members, g) => {
      if (members.length > 1) for (const i of members) done[b][i] = row[g] + latencies[g];
    }));
    return done;
  };
}

function betweenHosts(cluster, round) { // of shards of 1/L; returns when hosts are done
  if (round.groups) {
    const sizes = round.groups.map((hosts) => hosts.length);
    return meanOfGroups(round.groups, sizes.map((g) => milliseconds(2 * (g - 1) / g * cluster.bucket, cluster.gbps)),
      sizes.map((g) => 2 * (g - 1) * cluster.latency_us / 1000));
  }
  const edges = edgesOf(round), shards = new Edges(edges, edges, milliseconds(cluster.bucket, cluster.gbps),
    cluster.latency, false);
  return (launched, busy) => shards.send(launched, busy)[0];
}

function hierarchical(cluster, between) { // reduce-scatter inside hosts, a round of hosts, all-gather
  const { L, hosts } = cluster;
  const phase = milliseconds((L - 1) / L * cluster.bucket, cluster.intra_gbps)
    + (L - 1) * cluster.intra_latency_us / 1000,
    phases = Array(hosts).fill(phase);
  const host = (row) => range(hosts).map((h) => Math.max(...row.slice(h * L, h * L + L))),
    spread = (row) => row.flatMap((at) => Array(L).fill(at));
  return (launched, busy) => {
    const scattered = queue(launched.map((row) => host(maxima(row, busy.inside))), phases),
      all = scattered[scattered.length - 1];
    const exchanged = between(scattered, range(hosts).map((h) => busy.across[h * L]));
    const gathered = queue(exchanged.map((row) => maxima(row, all)), phases);
    busy.across = maxima(busy.across, spread(exchanged.reduce(maxima)));
    busy.inside = maxima(busy.inside, spread(gathered[gathered.length - 1]));
    return gathered.map(spread);
  };
}

function travel(launched, busy, even, odd) {
  if (!odd || launched.length === 1) return even(launched, busy);
  const other = { ...busy }, half = (parity) => launched.filter((_, b) => b % 2 === parity);
  const first = even(half(0), busy);
  Object.assign(other, { sent: busy.sent, received: busy.received });
  const second = odd(half(1), other);
  Object.assign(busy, { sent: other.sent, received: other.received });
  busy.across = maxima(busy.across, other.across);
  busy.inside = maxima(busy.inside, other.inside);
  return launched.map((_, b) => (b % 2 ? second : first)[Math.floor(b / 2)]);
}

function simulateGossip(cluster, rounds, staggered) { // messages overlap with the next step's computing (awc)
  const [even, odd] = [rounds, staggered].map((of) => of && of.map((round) => roundTime(cluster, round)));
  const zeros = () => Array(cluster.workers).fill(0), busy = { across: zeros(), inside: zeros(), sent: NONE,
    received: NONE };
  let ended = zeros(), begin = 0, launched = range(cluster.buckets).map(zeros);
  cluster.computing.forEach((compute, t) => {
    if (t === DATA.planner.discarded) begin = mean(ended);
    const computed = ended.map((at, i) => at + compute[i]);
    launched = travel(launched, busy, even[t % even.length], odd && odd[t % odd.length])
      .map((row) => maxima(row, computed));
    for (let b = 1; b < launched.length; b++) launched[b] = maxima(launched[b], launched[b - 1]);
    ended = launched[launched.length - 1];
  });
  return (mean(ended) - begin) / (DATA.planner.steps - DATA.planner.discarded);
}

function simulateAllreduce(cluster) {
  const n = cluster.workers, buckets = Math.ceil(cluster.payload / cluster.bucket_mb);
  const rate = cluster.L > 1 ? Math.min(cluster.gbps, cluster.intra_gbps) : cluster.gbps;
  const duration = milliseconds(2 * (n - 1) / n * cluster.payload / buckets, rate)
    + 2 * (n - 1) * cluster.latency_us / 1000;
  let ended = 0, begin = 0;
  cluster.computing.forEach((compute, t) => {
    if (t === DATA.planner.discarded) begin = ended;
    const slowest = Math.max(...compute);
    let arrived = ended;
    for (let b = 1; b <= buckets; b++) {
      const share = 1 - cluster.backward_share + cluster.backward_share * b / buckets;
      arrived = Math.max(arrived, ended + share * slowest) + duration;
    }
    ended = arrived;
  });
  return (ended - begin) / (DATA.planner.steps - DATA.planner.discarded);
}

function predictions(settings) { // of every method that exists on this cluster
  const cluster = clusterOf(settings), { families, shared, candidates } = DATA.topologies,
    size = `${cluster.workers}/${cluster.L}`;
  const compute = mean(cluster.computing.slice(DATA.planner.discarded).flat()), n = cluster.workers;
  const found = [{ method: "all-reduce", step: simulateAllreduce(cluster) }];
  for (const name of candidates) {
    const of = families[name]?.[size], rounds = of?.rounds.map((place) => shared[place]);
    if (!of) continue;
    const everybody = [{ kind: "subgroup", groups: [range(n)], leaving: Array(cluster.hosts).fill(2 * (n - 1) / n) }];
    found.push({ method: name, step: simulateGossip(cluster,
      name === "complete" && cluster.L === 1 ? everybody : rounds), gap: of.gap });
    if (of.staggered) found.push({ method: `${name}, staggered`,
      step: simulateGossip(cluster, rounds, of.staggered.map((place) => shared[place])), gap: of.gap });
    const between = families[`${name} between hosts`]?.[size];
    if (between) found.push({ method: `${name} between hosts`,
      step: simulateGossip(cluster, between.rounds.map((place) => shared[place])), gap: between.gap });
  }
  return found.map((line) => ({ ...line, compute, utilisation: compute / line.step,
    speedup: found[0].step / line.step }));
}
