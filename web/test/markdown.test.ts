import { describe, expect, it } from 'vitest';
import { inline, markdown } from '../src/lib/markdown';

const shape = (text: string) => markdown(text).map((block) => block.kind);

describe('notes in Markdown', () => {
  it('finds blocks', () => {
    expect(shape('# a\n\ntext\nmore\n\n- one\n- two\n\n> said\n\n```\n# code\n```\n---\n| a | b |\n|---|---|\n| 1 | 2 |')).toEqual(['heading', 'paragraph', 'list', 'quote', 'code', 'rule', 'table']);
    expect(markdown('```\n# code\n')).toEqual([{ kind: 'code', text: '# code\n' }]); // never closed
  });
  it('nests lists and marks tasks', () => {
    const [list] = markdown('1. a\n   - [x] b\n   - [ ] c\n2. d');
    expect(list).toMatchObject({ kind: 'list', ordered: true, start: 1, items: [{ blocks: [{ kind: 'paragraph' }, { kind: 'list', items: [{ done: true }, { done: false }] }] }, { done: null }] });
  });
  it('marks words, and leaves single signs and names with underscores alone', () => {
    expect(inline('**a** *b* ~~c~~ `d*e*`').map((one) => one.kind)).toEqual(['strong', 'text', 'em', 'text', 'del', 'text', 'code']);
    expect(inline('2 * 3 * 4, my_long_name, a**b')).toEqual([{ kind: 'text', text: '2 * 3 * 4, my_long_name, a**b' }]);
    expect(inline('**bold with *em* inside**')).toMatchObject([{ kind: 'strong', parts: [{ text: 'bold with ' }, { kind: 'em' }, { text: ' inside' }] }]);
  });
  it('makes links of safe addresses only, and of pictures', () => {
    expect(inline('[a](https://x.org/b) ![p](http://x.org/p.png)')).toMatchObject([{ kind: 'link', href: 'https://x.org/b' }, { text: ' ' }, { kind: 'link', href: 'http://x.org/p.png' }]);
    for (const bad of ['[a](javascript:alert(1))', '[a](data:text/html,x)', '[a](//x.org)', '[a]( jAvascript:x)', '<script>alert(1)</script>', '<img src=x onerror=alert(1)>']) {
      expect(JSON.stringify(markdown(bad))).not.toContain('"link"');
      expect(markdown(bad)).toMatchObject([{ kind: 'paragraph' }]);
    }
    expect(inline('see https://x.org/a_b_c, now')).toMatchObject([{ text: 'see ' }, { kind: 'link', href: 'https://x.org/a_b_c' }, { text: ', now' }]);
  });
  it('takes hostile texts, as long as a note can be, before the test runs out of time', () => {
    for (const piece of ['[', '*', '**a', '`', '> ', '- ', '_a ', '![', '](', '|', '~~', '\\', '[a](', '* _']) expect(markdown(piece.repeat(20_000 / piece.length)).length).toBeGreaterThan(0);
    for (const piece of ['> > > > > > > > > > > > x\n', '- - - - - - - - - - - x\n', '|\n', '#\n']) expect(markdown(piece.repeat(20_000 / piece.length)).length).toBeGreaterThan(0);
  });
});
