// Browsers start no worker for a page that was opened from a disk. There the script of a worker, which is that of the search, runs in a
// hidden frame: on the page's own thread, which a search of this size does not hold up.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentDocument;
      inside.open();
      inside.close();
      this.frame.contentWindow.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.createElement("script");
      script.src = url;
      this.started = new Promise((done) => { script.onload = done; });
      inside.body.append(script);
    }

    postMessage(data) {
      this.started.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
}
