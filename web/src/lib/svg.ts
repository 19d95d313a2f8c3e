// The subset of the canvas API that charts use, writing SVG, so that an exported figure is identical to the chart on the page.

const escape = (text: string) => text.replace(/[&<>"']/g, (sign) => `&#${sign.charCodeAt(0)};`);
const round = (n: number) => Number(n.toFixed(2));

export class SvgContext {
  strokeStyle = '#000';
  fillStyle = '#000';
  lineWidth = 1;
  globalAlpha = 1;
  font = '';
  textAlign = 'left';
  textBaseline = 'top';
  lineJoin = 'round';
  #path = '';
  #dash = '';
  #parts: string[] = [];
  #box: [number, number, number, number] = [0, 0, 0, 0];
  #clips = 0;

  constructor(readonly width: number, readonly height: number) {}

  setTransform() { /* one unit is one pixel */ }
  save() { /* state is set before each use */ }
  restore() { this.#parts.push('</g>'); }
  setLineDash(dash: number[]) { this.#dash = dash.join(' '); }
  measureText(text: string) { return { width: text.length * 6 }; }
  beginPath() { this.#path = ''; }
  moveTo(x: number, y: number) { this.#path += `M${round(x)} ${round(y)}`; }
  lineTo(x: number, y: number) { this.#path += `${this.#path ? 'L' : 'M'}${round(x)} ${round(y)}`; }
  rect(x: number, y: number, w: number, h: number) { this.#box = [x, y, w, h]; }
  arc(x: number, y: number, r: number) { this.#path += `M${round(x + r)} ${round(y)}A${r} ${r} 0 1 1 ${round(x - r)} ${round(y)}A${r} ${r} 0 1 1 ${round(x + r)} ${round(y)}`; }
  clip() {
    const [x, y, w, h] = this.#box;
    this.#parts.push(`<clipPath id="c${++this.#clips}"><rect x="${x}" y="${y}" width="${w}" height="${h}"/></clipPath><g clip-path="url(#c${this.#clips})">`);
  }
  stroke() {
    if (!this.#path) return;
    const dash = this.#dash ? ` stroke-dasharray="${this.#dash}"` : '';
    this.#parts.push(`<path d="${this.#path}" fill="none" stroke="${this.strokeStyle}" stroke-width="${this.lineWidth}" stroke-opacity="${this.globalAlpha}" stroke-linejoin="round"${dash}/>`);
  }
  fill() { if (this.#path) this.#parts.push(`<path d="${this.#path}" fill="${this.fillStyle}" fill-opacity="${this.globalAlpha}"/>`); }
  fillRect(x: number, y: number, w: number, h: number) { this.#parts.push(`<rect x="${x}" y="${y}" width="${w}" height="${h}" fill="${this.fillStyle}"/>`); }
  fillText(text: string, x: number, y: number) {
    const anchor = { right: 'end', center: 'middle' }[this.textAlign] ?? 'start';
    const down = this.textBaseline === 'middle' ? 4 : this.textBaseline === 'top' ? 9 : 0;
    this.#parts.push(`<text x="${round(x)}" y="${round(y + down)}" text-anchor="${anchor}" fill="${this.fillStyle}">${escape(text)}</text>`);
  }
  /** Return the SVG document, with a title for screen readers. */
  text(title: string): string {
    return `<svg xmlns="http://www.w3.org/2000/svg" width="${this.width}" height="${this.height}" viewBox="0 0 ${this.width} ${this.height}" font-family="system-ui, sans-serif" font-size="11"><title>${escape(title)}</title>${this.#parts.join('')}</svg>`;
  }
}
