import io.grpc.CallOptions;
import io.grpc.Channel;
import io.grpc.ClientInterceptors;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.Metadata;
import io.grpc.MethodDescriptor;
import io.grpc.Status;
import io.grpc.stub.ClientCalls;
import io.grpc.stub.MetadataUtils;
import io.grpc.stub.StreamObserver;
import java.io.BufferedReader;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;

/**
 * Calls with grpc-java as it comes, each with a deadline and, where it is unary, an id in its metadata, which has to come back:
 * java Calls.java unary CONNECTIONS TARGET METHOD, or stream CONNECTIONS TARGET METHOD; a request in base64 a line, an answer a line.
 */
public class Calls {
    static final Metadata.Key<String> ID = Metadata.Key.of("x-request-id", Metadata.ASCII_STRING_MARSHALLER);

    static final MethodDescriptor.Marshaller<byte[]> RAW = new MethodDescriptor.Marshaller<>() {
        @Override
        public InputStream stream(byte[] value) {
            return new ByteArrayInputStream(value);
        }

        @Override
        public byte[] parse(InputStream stream) {
            try {
                return stream.readAllBytes();
            } catch (IOException error) {
                throw new UncheckedIOException(error);
            }
        }
    };

    /** Completes a future with the one answer of a call, or with what went wrong. */
    static class One implements StreamObserver<byte[]> {
        final CompletableFuture<String> done = new CompletableFuture<>();
        private String answer = "error no answer";

        @Override
        public void onNext(byte[] value) {
            answer = Base64.getEncoder().encodeToString(value);
        }

        @Override
        public void onError(Throwable error) {
            done.complete("error " + Status.fromThrowable(error).getCode() + " " + Status.fromThrowable(error).getDescription());
        }

        @Override
        public void onCompleted() {
            done.complete(answer);
        }
    }

    static CompletableFuture<String> unary(Channel channel, MethodDescriptor<byte[], byte[]> method, byte[] request, int number) {
        Metadata sent = new Metadata();
        sent.put(ID, "call-" + number);
        AtomicReference<Metadata> headers = new AtomicReference<>();
        AtomicReference<Metadata> trailers = new AtomicReference<>();
        Channel with = ClientInterceptors.intercept(channel, MetadataUtils.newAttachHeadersInterceptor(sent),
                MetadataUtils.newCaptureMetadataInterceptor(headers, trailers));
        CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(60_000 + number, TimeUnit.MILLISECONDS);
        One one = new One();
        ClientCalls.asyncUnaryCall(with.newCall(method, options), request, one);
        return one.done.thenApply(answer -> {
            String id = trailers.get() == null ? null : trailers.get().get(ID);
            return answer.startsWith("error") || ("call-" + number).equals(id) ? answer : "error the id " + id + " came back";
        });
    }

    /** All requests on one stream, whose answers come in their order. */
    static CompletableFuture<List<String>> stream(Channel channel, MethodDescriptor<byte[], byte[]> method, List<byte[]> requests) {
        CompletableFuture<List<String>> done = new CompletableFuture<>();
        List<String> answers = new ArrayList<>();
        CallOptions options = CallOptions.DEFAULT.withDeadlineAfter(60, TimeUnit.SECONDS);
        StreamObserver<byte[]> target = ClientCalls.asyncBidiStreamingCall(channel.newCall(method, options), new StreamObserver<>() {
            @Override
            public void onNext(byte[] value) {
                answers.add(Base64.getEncoder().encodeToString(value));
            }

            @Override
            public void onError(Throwable error) {
                answers.add("error " + error.getMessage());
                done.complete(answers);
            }

            @Override
            public void onCompleted() {
                done.complete(answers);
            }
        });
        for (byte[] request : requests) {
            target.onNext(request);
        }
        target.onCompleted();
        return done;
    }

    public static void main(String[] arguments) throws Exception {
        boolean streams = arguments[0].equals("stream");
        List<ManagedChannel> channels = new ArrayList<>();
        for (int i = 0; i < Integer.parseInt(arguments[1]); i++) {
            channels.add(ManagedChannelBuilder.forTarget(arguments[2]).usePlaintext().maxInboundMessageSize(1 << 28).build());
        }
        MethodDescriptor<byte[], byte[]> method = MethodDescriptor.<byte[], byte[]>newBuilder()
                .setType(streams ? MethodDescriptor.MethodType.BIDI_STREAMING : MethodDescriptor.MethodType.UNARY)
                .setFullMethodName(arguments[3].substring(1)).setRequestMarshaller(RAW).setResponseMarshaller(RAW).build();
        List<byte[]> requests = new ArrayList<>();
        BufferedReader lines = new BufferedReader(new InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            requests.add(Base64.getDecoder().decode(line));
        }
        List<String> answers = new ArrayList<>();
        if (streams) {
            List<CompletableFuture<List<String>>> all = new ArrayList<>();
            for (ManagedChannel channel : channels) {
                all.add(stream(channel, method, requests));
            }
            for (CompletableFuture<List<String>> one : all) {
                answers.addAll(one.get());
            }
        } else {
            List<CompletableFuture<String>> all = new ArrayList<>();
            for (int i = 0; i < requests.size(); i++) {
                all.add(unary(channels.get(i % channels.size()), method, requests.get(i), i));
            }
            for (CompletableFuture<String> one : all) {
                answers.add(one.get());
            }
        }
        answers.forEach(System.out::println);
        for (ManagedChannel channel : channels) {
            channel.shutdown().awaitTermination(10, TimeUnit.SECONDS);
        }
    }
}
