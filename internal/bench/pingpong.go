package bench

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"github.com/HdrHistogram/hdrhistogram-go"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

const echoMethod = "/isthmus.bench.Echo/Echo"

// ServeEcho is the other end of the ping-pong: it sends each message back. It
// prints its address as one line to out, and serves until ctx ends.
func ServeEcho(ctx context.Context, out io.Writer) error {
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	s := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		for {
			m := new(wrapperspb.BytesValue)
			if err := stream.RecvMsg(m); err != nil {
				return nil //nolint:nilerr // the end of the stream
			}
			if err := stream.SendMsg(m); err != nil {
				return err
			}
		}
	}))
	context.AfterFunc(ctx, s.Stop)
	if _, err := fmt.Fprintln(out, lis.Addr()); err != nil {
		return err
	}
	return s.Serve(lis)
}

// mostPings bounds the rate of a ping-pong, in messages a second.
const mostPings = 1000

// startEcho starts the other end of the ping-pong, and returns its address.
func startEcho(ctx context.Context, program string) (address string, cmd *exec.Cmd, err error) {
	cmd = exec.CommandContext(ctx, program, "bench", "echo")
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	out, err := cmd.StdoutPipe()
	if err != nil {
		return "", nil, err
	}
	if err := cmd.Start(); err != nil {
		return "", nil, err
	}
	address, err = bufio.NewReader(out).ReadString('\n')
	if err != nil {
		stopEcho(cmd)
		return "", nil, fmt.Errorf("the other end of the ping-pong did not start: %w", err)
	}
	return strings.TrimSpace(address), cmd, nil
}

func stopEcho(cmd *exec.Cmd) {
	_ = cmd.Process.Signal(syscall.SIGTERM)
	_ = cmd.Wait()
}

// bareStreams returns the memory that each of n bare gRPC streams takes in a
// server, in bytes: streams that have received and sent some messages of 100
// bytes, on as many connections as the sinks have.
func bareStreams(ctx context.Context, program string, n int) (each float64, err error) {
	address, cmd, err := startEcho(ctx, program)
	if err != nil {
		return 0, err
	}
	defer stopEcho(cmd)
	conns, hangUp, err := dial(address, n)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, hangUp()) }()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	m := wrapperspb.Bytes(make([]byte, 100))
	before := int64(0)
	for i, conn := range conns {
		stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, echoMethod)
		if err != nil {
			return 0, err
		}
		for range 3 {
			if err := errors.Join(stream.SendMsg(m), stream.RecvMsg(m)); err != nil {
				return 0, err
			}
		}
		if i == 0 {
			before = resident(cmd.Process.Pid)
		}
	}
	return float64(resident(cmd.Process.Pid)-before) / float64(n), nil
}

// pingPong measures a bare gRPC message of 100 bytes to another process and
// back, paced like the changes: most of it is the time in which an idle machine
// wakes up.
func pingPong(ctx context.Context, program string, rate float64, duration time.Duration) (*hdrhistogram.Histogram, error) {
	address, cmd, err := startEcho(ctx, program)
	if err != nil {
		return nil, err
	}
	defer stopEcho(cmd)
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stream, err := conn.NewStream(ctx, &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}, echoMethod)
	if err != nil {
		return nil, err
	}
	m := wrapperspb.Bytes(make([]byte, 100))
	h := newHistogram()
	pace := time.NewTicker(time.Duration(float64(time.Second) / min(rate, mostPings)))
	defer pace.Stop()
	for end := time.Now().Add(duration); time.Now().Before(end); {
		select {
		case <-pace.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		at := time.Now()
		if err := stream.SendMsg(m); err != nil {
			return nil, err
		}
		if err := stream.RecvMsg(m); err != nil {
			return nil, err
		}
		_ = h.RecordValue(time.Since(at).Nanoseconds())
	}
	return h, nil
}
