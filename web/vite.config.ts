// Stable file names: the build is committed, so that a rebuild changes the same files, and the server's ETags keep browsers up to date.
// All URLs are relative, so that the page works under any path of a proxy.
import { svelte } from '@sveltejs/vite-plugin-svelte';
import { defineConfig } from 'vitest/config';

export default defineConfig({
  plugins: [svelte()],
  test: { include: ['test/**/*.test.ts'] },
  base: './',
  build: {
    target: 'es2022',
    outDir: '../src/fanfold/server/static',
    emptyOutDir: true,
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
    rollupOptions: {
      output: {
        // One file for what the first page needs: two of half the size compress worse.
        codeSplitting: { groups: [{ name: 'core', test: /node_modules|src\/(App|Chart|ChartTools|Controls|Loading|Outage|RunList|Status|Top|Views|pages\/Charts)\.svelte|src\/app\.css|src\/lib\/(api|chart|colours|copy|dismiss|flow|format|keys|layout|lazy|live|model|points|queue|refused|scale|shown|theme|view|wire|workspace)\b/ }] },
        entryFileNames: '[name].js', chunkFileNames: '[name].js', assetFileNames: '[name][extname]' },
    },
  },
  worker: { format: 'es', rollupOptions: { output: { entryFileNames: '[name].js' } } },
});
