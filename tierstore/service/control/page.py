"""The status page: one self-contained HTML document that polls `/admin/models`. A constant; any thread."""

from __future__ import annotations

CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'"

STATUS_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">
<title>tierstore</title><link rel="icon" href="data:,">
<style>
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#1c2330;--dim:#667085;--line:#e3e6ec;--accent:#2563eb;
--overlay:#8b5cf6;--device:#db2777;--host:#16a34a;--disk:#d97706;--remote:#0891b2;--absent:#94a3b8;--bad:#dc2626}
@media(prefers-color-scheme:dark){:root{--bg:#10141b;--card:#181e28;--ink:#e6eaf0;--dim:#94a0b3;--line:#293140;--accent:#60a5fa}}
*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);font:14px/1.45 system-ui,sans-serif}
main,header{max-width:1080px;margin:0 auto;padding:16px 20px}header{display:flex;gap:14px;align-items:baseline;flex-wrap:wrap}
h1{font-size:20px;margin:0}h2{font-size:16px;margin:0 0 2px}h3{font-size:12px;color:var(--dim);margin:14px 0 4px;font-weight:600}
.dim{color:var(--dim)}.grow{flex:1}.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(150px,1fr));gap:10px;margin-bottom:16px}
.tile,.card{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:12px 14px}.card{margin-bottom:14px}
.tile b{display:block;font-size:20px;font-variant-numeric:tabular-nums}.tile span{color:var(--dim);font-size:12px}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}td,th{text-align:left;padding:4px 10px 4px 0;border-top:1px solid var(--line)}
th{font-size:12px;color:var(--dim);font-weight:500;border:0}.pill{border-radius:9px;padding:1px 8px;font-size:12px;background:var(--line)}
.pill.active,.pill.ready{background:var(--host);color:#fff}.pill.canary{background:#eab308;color:#1c2330}.pill.loading{background:var(--accent);color:#fff}.pill.stale,.pill.bad{background:var(--bad);color:#fff}
.bar{display:flex;height:10px;border-radius:5px;overflow:hidden;background:var(--line);min-width:120px}.bar i{display:block}
.legend{display:flex;gap:12px;flex-wrap:wrap;font-size:12px;color:var(--dim)}.legend i{display:inline-block;width:9px;height:9px;border-radius:2px;margin-right:4px}
.spark{display:flex;align-items:flex-end;height:36px;margin-top:6px}.spark i{flex:1 1 0;min-width:0;min-height:1px;background:var(--accent)}#history{grid-template-columns:repeat(auto-fit,minmax(240px,1fr))}
.problem{color:var(--bad)}a{color:var(--accent)}
@media(max-width:760px){main,header{padding:12px}tr{display:grid;grid-template-columns:repeat(auto-fill,minmax(120px,1fr));gap:4px 12px;
  padding:8px 0;border-top:1px solid var(--line)}tr:has(th){display:none}td{border:0;padding:0;min-width:0;overflow-wrap:anywhere}
  td::before{content:attr(data-head);display:block;font-size:12px;color:var(--dim)}.bar{min-width:0}.tiles{grid-template-columns:repeat(auto-fit,minmax(120px,1fr))}}
</style></head><body>
<header><h1>tierstore</h1><span id="state" class="pill">…</span><span id="version" class="dim"></span><span class="grow"></span>
<a href="/docs">API</a><a href="/metrics">metrics</a><a href="/admin/jobs">jobs</a></header>
<main><div class="tiles" id="tiles"></div><div class="tiles" id="history"></div><div id="models"></div></main>
<script>
"use strict";
const TIERS=["overlay","device","host","disk","remote","absent"];
const $=id=>document.getElementById(id);
function el(tag,attrs,...kids){const e=document.createElement(tag);for(const k in attrs||{})k==="style"?e.style.cssText=attrs[k]:e.setAttribute(k,attrs[k]);
  for(const k of kids)e.append(k);return e}
const num=n=>n==null?"–":Math.round(n).toLocaleString("en");
function size(n){if(n==null)return"–";const u=["B","KiB","MiB","GiB","TiB"];let i=0;while(n>=1024&&i<4){n/=1024;i++}return(i?n.toFixed(1):n)+" "+u[i]}
const pct=(a,b)=>b?(100*a/b).toFixed(1)+" %":"–";
function tile(label,value){return el("div",{class:"tile"},el("b",{},value),el("span",{},label))}
function bar(parts){const sum=parts.reduce((s,p)=>s+p[1],0);const b=el("div",{class:"bar"});
  for(const [name,n] of parts)if(n>0)b.append(el("i",{style:`width:${100*n/sum}%;background:var(--${name})`,title:`${name}: ${num(n)}`}));return b}
function fill(used,total,color){return el("div",{class:"bar",title:`${size(used)} of ${size(total)}`},el("i",{style:`width:${total?Math.min(100,100*used/total):0}%;background:var(--${color})`}))}
function table(heads,rows){const t=el("table",{},el("tr",{},...heads.map(h=>el("th",{},h))));
  for(const cells of rows)t.append(el("tr",{},...cells.map((c,i)=>el("td",{"data-head":heads[i]},...[].concat(c)))));return t}
let last=null;
function rates(now){const out={requests:null,tables:{}};if(last){const s=(now.at-last.at)/1000;out.requests=(now.doc.service.requests-last.doc.service.requests)/s;
  const old=Object.fromEntries(last.doc.models.map(m=>[m.model,m]));
  for(const m of now.doc.models)for(const t in m.tables){const b=old[m.model]&&old[m.model].tables[t];if(!b)continue;
    const d={};let sum=0;for(const k in m.tables[t].lookup_keys){d[k]=Math.max(0,m.tables[t].lookup_keys[k]-(b.lookup_keys[k]||0));sum+=d[k]}
    out.tables[m.model+"/"+t]={keys:sum/s,by:d,sum}}}return out}
const past=[];
function since(then,now){return{seconds:(now.at-then.at)/1000,counts:now.counts.map((n,i)=>n-then.counts[i]),failed:now.failed-then.failed}}
function quantile(q,counts,bounds){let left=q*counts.reduce((a,b)=>a+b,0);if(!left)return null;
  for(let i=0;i<bounds.length;i++){if(left<=counts[i]){const low=i?bounds[i-1]:0;return low+(bounds[i]-low)*left/counts[i]}left-=counts[i]}return bounds[bounds.length-1]}
const ms=s=>s==null?"–":(1000*s).toFixed(s<.01?2:0)+" ms";
function note(at,figures){const now={at,counts:figures.counts,failed:figures.failed},before=past[past.length-1];
  if(before&&now.counts.some((n,i)=>n<before.counts[i]))past.length=0;
  else if(before){const d=since(before,now),n=d.counts.reduce((a,b)=>a+b,0);now.rate=n/d.seconds;now.failing=d.failed/d.seconds;now.p99=quantile(.99,d.counts,figures.bounds)}
  past.push(now);while(past[0].at<at-3e5)past.shift();return since(past.find(p=>p.at>=at-6e4),now)}
function history(label,key,text){const seen=past.slice(-200),most=Math.max(...seen.map(p=>p[key]||0));
  return el("div",{class:"tile"},el("span",{},`${label}, last ${Math.round((seen[seen.length-1].at-seen[0].at)/1000)} s, at most ${text(most)}`),
    el("div",{class:"spark"},...seen.map(p=>el("i",{style:`height:${most?100*(p[key]||0)/most:0}%`,title:text(p[key])}))))}
function model(m,rate){const card=el("div",{class:"card"},el("h2",{},m.model));
  card.append(el("span",{class:"dim"},m.active_version==null?"no active version":`version ${m.active_version} · watermark ${num(m.watermark)}`+
    (m.overlays?` · ${m.overlays} deltas not folded yet (${size(m.overlay_bytes)})`:"")));
  if(m.canary)card.append(el("div",{class:"dim"},`canary ${m.canary.version} gets ${+(100*m.canary.share).toFixed(2)} % of the requests · watermark ${num(m.canary.watermark)}`));
  if(m.problem)card.append(el("div",{class:"problem"},m.problem));
  if(m.versions.length)card.append(el("h3",{},"Versions"),table(["version","state","labels","watermark","made","dense part"],
    [...m.versions].reverse().map(v=>[String(v.version),[el("span",{class:"pill "+v.state},v.state),v.state==="loading"?` ${v.phase} ${pct(v.done,v.total)}`:""],
      (v.labels||[]).join(", ")||"–",num(v.watermark),v.created_at||"–",v.dense||"–"])));
  const names=Object.keys(m.tables);if(names.length){const t=table(["table","rows","keys/s","answered by","memory","host memory","disk"],names.map(n=>{
    const x=m.tables[n],r=rate.tables[m.model+"/"+n];const by=r&&r.sum?r.by:x.lookup_keys;const sum=Object.values(by).reduce((a,b)=>a+b,0);
    const fast=(by.overlay||0)+(by.device||0)+(by.host||0);
    return[[n,el("div",{class:"dim"},`${x.dim} × ${x.dtype}`)],(x.rows_exact?"":"≈ ")+num(x.rows),r?num(r.keys):"–",[bar(TIERS.map(k=>[k,by[k]||0]))],pct(fast,sum),
      [fill(x.tier_bytes.host,x.tier_budget_bytes.host,"host"),el("div",{class:"dim"},`${size(x.tier_bytes.host)} of ${size(x.tier_budget_bytes.host)}`)],size(x.tier_bytes.disk)]}));
    card.append(el("h3",{},"Tables"),t,el("div",{class:"legend"},...TIERS.map(k=>el("span",{},el("i",{style:`background:var(--${k})`}),k))))}
  return card}
function show(now){const d=now.doc,s=d.service,r=rates(now);
  const w=d.warming&&`warming ${pct(d.warming.done,d.warming.total)}`;
  $("state").textContent=w?(s.ready?`ready, ${w}`:w):s.ready?"ready":"stopping";$("state").className="pill "+(s.ready?"ready":"stale");$("version").textContent=`${s.version} · up ${num(s.uptime_s)} s`;
  const minute=note(now.at,s.request_seconds),asked=minute.counts.reduce((a,b)=>a+b,0),at=q=>ms(quantile(q,minute.counts,s.request_seconds.bounds));
  const keys=Object.values(r.tables).reduce((a,b)=>a+b.keys,0);
  const tiles=[tile("requests/s",r.requests==null?"–":num(r.requests)),tile("keys/s",last?num(keys):"–"),
    tile("p50, last minute",at(.5)),tile("p99, last minute",at(.99)),tile("errors, last minute",minute.failed?`${num(minute.failed)} (${pct(minute.failed,asked)})`:"0"),
    tile("look-ups waiting",`${s.lookup_queue.used} / ${s.lookup_queue.total}`),tile("look-ups in flight",size(s.inflight_bytes.used))];
  if(d.host_budget)tiles.push(tile("host budget",`${size(d.host_budget.used)} / ${size(d.host_budget.total)}`));
  if(d.device&&d.device.present)tiles.push(tile("device budget",`${size(d.device_budget.used)} / ${size(d.device_budget.total)}`));
  if(d.overlay_budget)tiles.push(tile("overlays",`${size(d.overlay_budget.used)} / ${size(d.overlay_budget.total)}`));
  if(s.watch)tiles.push(tile("watched deltas",num(s.watch.applied)));
  $("tiles").replaceChildren(...tiles);
  $("history").replaceChildren(history("requests/s","rate",num),history("p99","p99",ms),history("errors/s","failing",n=>(n||0).toFixed(1)));
  const cards=d.models.map(m=>model(m,r));
  if(s.watch)for(const m in s.watch.held_up)cards.unshift(el("div",{class:"card problem"},`watched directory, ${m}: ${s.watch.held_up[m]}`));
  if(!d.models.length)cards.push(el("div",{class:"card dim"},"No models yet: load a snapshot with “tierstore load SNAPSHOT --url "+location.origin+"”."));
  $("models").replaceChildren(...cards);last=now}
async function tick(){try{if(!document.hidden){const a=await fetch("/admin/models",{cache:"no-store"});if(!a.ok)throw 0;show({at:performance.now(),doc:await a.json()})}}
  catch(e){$("state").textContent="unreachable";$("state").className="pill bad"}setTimeout(tick,1500)}
tick();
</script></body></html>
"""
