// unpack proves that Go's own readers accept what deltafold writes: `unpack gzip|zlib|lzw` reads
// stdin, writes stdout and fails on any error, trailing bytes included.
package main

import (
	"bufio"
	"compress/gzip"
	"compress/lzw"
	"compress/zlib"
	"fmt"
	"io"
	"os"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "unpack:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("usage: unpack gzip|zlib|lzw <packed >plain")
	}
	// A byte reader: the readers then take no byte past the end of their stream.
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := bufio.NewWriterSize(os.Stdout, 1<<20)
	var plain io.ReadCloser
	var err error
	switch args[0] {
	case "gzip":
		plain, err = gzip.NewReader(in)
	case "zlib":
		plain, err = zlib.NewReader(in)
	case "lzw":
		plain = lzw.NewReader(in, lzw.LSB, 8)
	default:
		return fmt.Errorf("unknown format %q", args[0])
	}
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, plain); err != nil {
		return err
	}
	if err := plain.Close(); err != nil {
		return err
	}
	if _, err := in.ReadByte(); err != io.EOF {
		return fmt.Errorf("bytes after the end of the %s stream", args[0])
	}
	return out.Flush()
}
