// A page that was opened as a file may not start a Worker. There the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      this.ready = new Promise((resolve) => frame.addEventListener("load", () => resolve(frame.contentWindow)));
      frame.srcdoc =
        "<script>postMessage = (data) => parent.dispatchEvent(new parent.CustomEvent('found', { detail: data }))</script>" +
        `<script src="${url}"></script>`;
      addEventListener("found", (event) => this.dispatchEvent(new MessageEvent("message", { data: event.detail })));
      document.body.append(frame);
    }

    postMessage(data) {
      this.ready.then((inside) => inside.dispatchEvent(new inside.MessageEvent("message", { data })));
    }
  };
}
